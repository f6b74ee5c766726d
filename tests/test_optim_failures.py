"""FusedEmaAdam after a failure or an interrupt: what is updated, what the exception says, and the second call."""

from __future__ import annotations

import gc

from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests import interrupts
from tests._optim import OPTIONS, SETTINGS, assert_all_equal, states_of
from tests.interrupts import Campaign, Failed, FailOperators, Report

each_configuration = pytest.mark.parametrize("name", interrupts.CONFIGURATIONS)


def notes_of(caught):
    return "\n".join(getattr(caught.value, "__notes__", ()))


def groups(**options):
    """Return an optimizer in front of its second step, of two groups that are updated one after the other."""
    weights = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    optimizer = FusedEmaAdam([{"params": weights[:3]}, {"params": weights[3:]}], **{**SETTINGS, **options})
    for _ in range(2):
        for weight in weights:
            weight.grad = weight.detach() + 1
        if not optimizer.state:
            optimizer.step()
    return weights, optimizer


def fail_in_second_group(optimizer):
    FailOperators(1, 1, "fused_adam").run(optimizer.step)


@pytest.mark.parametrize("flatten", [False, True])
def test_after_a_failure_updated_parameters_have_no_gradient_and_a_second_call_updates_the_others(flatten):
    weights, optimizer = groups(flatten=flatten)
    expected, expected_optimizer = groups(flatten=flatten)
    with pytest.raises(Failed) as caught:
        fail_in_second_group(optimizer)
    assert "the step updated these parameters, and set their grad to None: 0-2 of group 0." in notes_of(caught)
    assert [weight.grad is None for weight in weights] == [True, True, True, False]
    assert [int(optimizer.state[weight]["step"]) for weight in weights] == [2, 2, 2, 1]
    optimizer.step()
    expected_optimizer.step()
    assert_all_equal([*weights, *states_of(optimizer)], [*expected, *states_of(expected_optimizer)])


def test_recomputed_gradients_after_a_failure_start_a_new_step():
    weights, optimizer = groups()
    with pytest.raises(Failed):
        fail_in_second_group(optimizer)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [int(optimizer.state[weight]["step"]) for weight in weights] == [3, 3, 3, 2]


def test_an_incomplete_update_is_finished_by_the_next_call():
    weights, optimizer = groups()
    before = states_of(optimizer)
    with pytest.raises(Failed) as caught, pytest.warns(UserWarning, match="a second attempt .* failed as well"):
        FailOperators(1, 1000).run(optimizer.step)  # all but the count of the first group
    assert "3 of these are partially updated" in notes_of(caught)
    assert "0-2 of group" not in notes_of(caught)
    optimizer.state_dict()
    assert_all_equal(states_of(optimizer), before)
    assert all(weight.grad is not None for weight in weights)


def test_the_function_reports_which_parameters_it_has_updated():
    wide, narrow = torch.ones(2), torch.ones(2, dtype=torch.float16)
    lists = [[tensor.clone() for tensor in (wide, narrow)] for _ in range(5)]
    steps = [torch.tensor(0), torch.tensor(0)]
    mode = FailOperators(3, 1)  # after the three operators of the kernels for float32
    with pytest.raises(Failed) as caught:
        mode.run(lambda: fused_ema_adam(*lists, steps, **OPTIONS))
    assert "fused_ema_adam: updated parameters: 0 of 2" in notes_of(caught)
    assert [int(step) for step in steps] == [1, 0]


def test_weights_are_restored_without_allocating_memory():
    # Nothing is allocated on the way out of a swap of parameters of float32.
    weights, optimizer = groups()
    before = [weight.detach().clone() for weight in weights]
    mode = FailOperators(0, 0)
    with optimizer.swap_ema_params():
        mode.__enter__()
    mode.__exit__(None, None, None)
    assert_all_equal([weight.detach() for weight in weights], before)
    assert set(mode.seen) == {"aten.copy_.default"}


def test_weights_that_cannot_be_restored_are_kept_until_they_can():
    weights, optimizer = groups()
    before = [*(weight.detach().clone() for weight in weights), *states_of(optimizer)]
    mode = FailOperators(0, 1000)
    sentence = "weights of parameters 0-2 of group 0 and 0 of group 1 could not be restored"
    with pytest.raises(RuntimeError, match=sentence):
        with optimizer.swap_ema_params():
            mode.__enter__()
    mode.__exit__(None, None, None)
    optimizer.state_dict()
    assert_all_equal([*(weight.detach() for weight in weights), *states_of(optimizer)], before)


def test_a_swap_that_is_garbage_collected_restores_the_weights():
    # As after an interrupt before the first bytecode of __exit__.
    weights, optimizer = groups()
    before = [weight.detach().clone() for weight in weights]
    swap = optimizer.swap_ema_params()
    swap.__enter__()
    assert not torch.equal(weights[0].detach(), before[0])
    del swap
    assert_all_equal([weight.detach() for weight in weights], before)
    optimizer.state_dict()


def test_a_swap_whose_exit_failed_does_not_affect_a_later_one():
    weights, optimizer = groups()
    failed, mode = optimizer.swap_ema_params(), FailOperators(0, 1000)
    with pytest.raises(RuntimeError, match="could not be restored"), failed:
        mode.__enter__()
    mode.__exit__(None, None, None)
    optimizer.state_dict()
    with optimizer.swap_ema_params():
        del failed
        gc.collect()
        with pytest.raises(RuntimeError, match="leave the with block first"):
            optimizer.step()


def test_a_swap_is_a_decorator_too():
    weights, optimizer = groups()

    @optimizer.swap_ema_params()
    def shown():
        return weights[0].detach().clone()

    for _ in range(2):
        assert torch.equal(shown(), optimizer.state[weights[0]]["ema_params"])


def test_a_swap_does_not_decorate_functions_whose_body_runs_later():
    _, optimizer = groups()

    def batches():
        yield

    async def predict():
        pass

    async def stream():
        yield

    for function in (batches, predict, stream):
        with pytest.raises(TypeError, match=rf"^swap_ema_params: .*{function.__name__}.* use a with block inside it$"):
            optimizer.swap_ema_params()(function)


@each_configuration
@pytest.mark.every_nth_case(4)
def test_no_state_is_lost_whichever_operators_fail(name, monkeypatch):
    monkeypatch.setattr(interrupts, "CONFIGURATIONS", {name: interrupts.CONFIGURATIONS[name]})
    report = Report()
    Campaign("cpu", report).fail_operators((1, 1000), every=307)
    assert not report.losses, report
    assert sum(report.disturbed.values()) > 2


def test_no_state_is_lost_whenever_a_signal_arrives():
    report = Report()
    with interrupts.timer_raises():
        Campaign("cpu", report).interrupt(20)
    assert not report.losses, report
    assert sum(report.disturbed.values()) > 5


def test_no_state_is_lost_wherever_a_signal_arrives_in_an_update(monkeypatch):
    monkeypatch.setattr(interrupts, "CONFIGURATIONS", {"flat": {"flatten": True}})
    report = Report()
    with interrupts.timer_raises():
        Campaign("cpu", report).interrupt_everywhere(file="step_progress.py")
    assert not report.losses, report
    assert report.disturbed["signals at places"] > 50


@each_configuration
@pytest.mark.every_nth_case(4)
def test_no_state_is_lost_wherever_a_signal_arrives(name, monkeypatch):
    monkeypatch.setattr(interrupts, "CONFIGURATIONS", {name: interrupts.CONFIGURATIONS[name]})
    report = Report()
    with interrupts.timer_raises():
        Campaign("cpu", report).interrupt_everywhere(every=97)
    assert not report.losses, report
    assert report.disturbed["signals at places"] > 10


@pytest.mark.parametrize("moved", ["step", "exp_avg", "exp_avg_sq", "ema_params", "master_params"])
def test_the_campaign_detects_a_first_step_that_changed_a_single_state(moved):
    attempt = interrupts.Attempt("cpu", "masters", "step", 0)
    with pytest.raises(Failed) as caught:
        FailOperators(0, 1, "fused_adam").run(attempt.act)
    optimizer, first = attempt._trainee.optimizer, attempt._trainee.params[0]
    optimizer.state[first][moved].add_(1)
    assert attempt.lost(caught.value) == "parameter 0 is partially updated"


def test_a_repeated_step_updates_no_average_twice_even_if_its_parameter_has_moved():
    partly = 0
    for nth in range(0, 60, 3):
        attempt = interrupts.Attempt("cpu", "flat mixed", "step", 2)
        params = attempt._trainee.params
        try:
            FailOperators(nth, 1).run(attempt.act)
        except Failed as error:
            is_updated = [param.grad is None for param in params if param.numel()]
            partly += any(is_updated) and not all(is_updated)
            for param in params:
                param.data = param.data.clone()
            assert attempt.lost(error) == "", nth
    assert partly
