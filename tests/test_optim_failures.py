"""FusedEmaAdam after a failure: what a step says and what a swap restores."""

import itertools

from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._failing_steps import CONFIGURATIONS, Failed, FailOperators, Trainee
from tests._optim import OPTIONS, SETTINGS, assert_all_equal, each_flatten, unchanged

NOTE = "FusedEmaAdam: the step stopped midway, so that parameters may be partly updated; load a checkpoint"


def notes_of(caught):
    return "\n".join(getattr(caught.value, "__notes__", ()))


def groups(steps=1, **options):
    """Return an optimizer in front of another step, of two groups that are updated one after the other."""
    weights = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    optimizer = FusedEmaAdam([{"params": weights[:3]}, {"params": weights[3:]}], **{**SETTINGS, **options})
    for weight in weights:
        weight.grad = weight.detach() + 1
    for _ in range(steps):
        optimizer.step()
    return weights, optimizer


@each_flatten
def test_a_step_that_fails_midway_says_to_load_a_checkpoint(flatten):
    weights, optimizer = groups(flatten=flatten)
    with pytest.raises(Failed) as caught:
        FailOperators(1, 1, "fused_adam").run(optimizer.step)  # in the second group
    assert notes_of(caught) == NOTE
    assert all(weight.grad is not None for weight in weights)


@each_flatten
def test_what_a_step_refuses_changes_nothing_and_has_no_note(flatten):
    weights, optimizer = groups(flatten=flatten)
    weights[3].grad = torch.ones(3).to_sparse()
    sentence = "gradient of parameter 0 of group 1 must be dense"
    with unchanged(optimizer), pytest.raises(RuntimeError, match=sentence) as caught:
        optimizer.step()
    assert not notes_of(caught)


@each_flatten
def test_states_of_all_groups_are_made_before_the_first_write(flatten):
    _, optimizer = groups(0, flatten=flatten)
    mode = FailOperators(10**6, 1)
    mode.run(optimizer.step)
    first_write = next(i for i, name in enumerate(mode.seen) if "_foreach_add_" in name)
    made = [i for i, name in enumerate(mode.seen) if "zeros" in name or "clone" in name]
    assert made and max(made) < first_write


def test_the_function_says_it_too():
    lists = [[torch.ones(2), torch.ones(2, dtype=torch.float16)] for _ in range(5)]
    with pytest.raises(Failed) as caught:
        FailOperators(3, 1).run(lambda: fused_ema_adam(*lists, [torch.tensor(0), torch.tensor(0)], **OPTIONS))
    assert notes_of(caught) == NOTE


def test_weights_are_restored_without_allocating_memory():
    # Nothing is allocated on the way out of a swap of parameters of float32.
    _, optimizer = groups()
    mode = FailOperators(0, 0)
    with unchanged(optimizer):
        with optimizer.swap_ema_params():
            mode.__enter__()
        mode.__exit__(None, None, None)
    assert set(mode.seen) == {"aten.copy_.default"}


@pytest.mark.parametrize(
    "restored, lost",
    [
        (0, "parameters .0, 1, 2. of group 0 and .0. of group 1, buffer 'running_mean', buffer 'running_var', "),
        (4, "swap_ema_params: buffer 'running_mean', buffer 'running_var', "),
    ],
    ids=["nothing is restored", "the weights are"],
)
def test_a_swap_that_cannot_restore_something_names_it_and_leaves_the_optimizer_usable(restored, lost):
    weights, optimizer = groups(ema_buffers=nn.BatchNorm1d(3))
    before = optimizer.state_dict()
    sentence = f"{lost}buffer 'num_batches_tracked' could not be restored; load a checkpoint"
    mode = FailOperators(4 + restored, 1000, "copy_")  # after 4 copies to the averages
    with pytest.raises(RuntimeError, match=sentence), optimizer.swap_ema_params():
        mode.__enter__()
    mode.__exit__(None, None, None)
    optimizer.load_state_dict(before)
    with optimizer.swap_ema_params():
        pass
    optimizer.step()


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.every_nth_case(8)
@pytest.mark.parametrize("error", [Failed, KeyboardInterrupt])
def test_after_any_failing_operator_a_swap_has_restored_the_weights(name, error):
    for nth in itertools.count():
        trainee, mode, is_lost = Trainee(**CONFIGURATIONS[name]), FailOperators(nth, 1, error=error), False
        before = trainee.contents()
        try:
            mode.run(trainee.swap)
        except (RuntimeError, KeyboardInterrupt) as caught:
            is_lost = "could not be restored; load a checkpoint" in str(caught)
        if is_lost:
            trainee.resume()
            continue
        assert_all_equal(trainee.contents(), before)
        with trainee.optimizer.swap_ema_params():
            for param in trainee.params:
                assert torch.equal(param, trainee.optimizer.state[param]["ema_params"].to(param.dtype))
        if len(mode.seen) <= nth:
            break
    assert nth > 0


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.every_nth_case(4)
def test_after_any_failing_operator_of_a_step_a_checkpoint_continues_it(name):
    expected = Trainee(**CONFIGURATIONS[name])
    expected.step()
    for nth in itertools.count(0, 7):
        trainee, mode = Trainee(**CONFIGURATIONS[name]), FailOperators(nth, 1)
        try:
            mode.run(trainee.step)
        except RuntimeError as error:
            if "may be partly updated; load a checkpoint" not in "".join(getattr(error, "__notes__", ())):
                assert_all_equal(trainee.contents()[: len(trainee.params)], trainee.weights)
            trainee.resume()
        assert_all_equal(trainee.contents(), expected.contents())
        if len(mode.seen) <= nth:
            break
    assert nth > 0
