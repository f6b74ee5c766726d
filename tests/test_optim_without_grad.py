"""FusedEmaAdam: the averages of parameters that get no gradient, new starts of averages, and wrappers of others."""

from types import SimpleNamespace

from torch_aclnn_ops.optim import FusedEmaAdam, unwrap

import pytest
import torch
from torch import nn

from tests._optim import (
    Weights,
    assert_all_close,
    assert_all_equal,
    averaged,
    averaged_model,
    averages_of,
    each_flatten,
    states_of,
    step_with,
    train,
    trained,
    weights_of,
)
from tests.test_optim_averages import SCHEDULES

# Compiled always, one of each kind; compilation takes a hundred times the steps.
COMPILED = ("late ratio", "every third")


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_averages_without_a_gradient_equal_those_of_swa_utils(dtype, flatten):
    model = Weights(dtype)
    optimizer = FusedEmaAdam(model.parameters(), lr=1e-2, ema_decay=0.9, ema_start_step=1, flatten=flatten)
    expected = averaged_model(model, 0.9)
    for step in range(20):
        model.set_gradients(step)
        for i, weight in enumerate(model.parameters()):
            if step > 0 and (step + i) % 3 == 0:
                weight.grad = None
        optimizer.step()
        expected.update_parameters(model)
    tolerance = 1e-6 if dtype.itemsize == 4 else 1e-14
    assert_all_close(averages_of(model, optimizer), weights_of(expected.module), tolerance)


@each_flatten
@pytest.mark.parametrize(
    ("is_compiled", "options", "decays"),
    [
        pytest.param(
            is_compiled,
            *schedule,
            id=f"{'compiled' if is_compiled else 'eager'}-{name}",
            marks=[pytest.mark.exhaustive] if is_compiled and name not in COMPILED else [],
        )
        for is_compiled in (False, True)
        for name, schedule in SCHEDULES.items()
    ],
)
@pytest.mark.every_nth_case(4)
def test_a_schedule_uses_the_largest_step_count(options, decays, flatten, is_compiled):
    model = Weights(torch.float64)
    optimizer = FusedEmaAdam(model.parameters(), lr=1e-2, ema_decay=0.6, **options, flatten=flatten)
    step = torch.compile(optimizer.step, fullgraph=True, backend="eager") if is_compiled else optimizer.step
    averages = weights_of(model)
    for i, decay in enumerate(decays):
        model.set_gradients(i)
        if i > 0:
            for weight in list(model.parameters())[1:]:
                weight.grad = None
        step()
        averages = averaged(averages, model, decay)
        assert_all_close(averages_of(model, optimizer), averages, 1e-6 if is_compiled else 1e-14)
    assert [int(optimizer.state[weight]["step"]) for weight in model.parameters()] == [len(decays), 1, 1, 1, 1, 1]


@each_flatten
@pytest.mark.parametrize("last", ["without any gradient", "with averages of one group"])
def test_a_schedule_counts_the_parameters_of_all_groups(flatten, last):
    frozen, trained = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [frozen]}, {"params": [trained], "ema_without_grad": last == "without any gradient"}]
    optimizer = FusedEmaAdam(groups, lr=0.1, ema_decay=0.5, ema_update_every=3, flatten=flatten)
    for step in range(4):  # the last one repeats step 3 for the schedule, which updates the averages
        for weight in (frozen, trained):
            weight.grad = torch.ones(4, dtype=torch.float64) if step < (1 if weight is frozen else 3) else None
        before = optimizer.state[frozen]["ema_params"].clone() if step else None
        optimizer.step()
        is_updated = before is not None and not torch.equal(optimizer.state[frozen]["ema_params"], before)
        assert is_updated == (step >= 2)


@each_flatten
def test_ema_without_grad_false_freezes_the_averages(flatten):
    model = Weights()
    moving, still = list(model.parameters())[:3], list(model.parameters())[3:]
    groups = [{"params": moving}, {"params": still, "ema_without_grad": False}]
    optimizer = FusedEmaAdam(groups, lr=0.1, ema_decay=0.5, flatten=flatten)
    train(model, optimizer, [0])
    before = [average.clone() for average in averages_of(model, optimizer)]
    optimizer.zero_grad()
    optimizer.step()
    after = averages_of(model, optimizer)
    assert_all_equal(after[3:], before[3:])
    assert_all_close(after[:3], averaged(before, model, 0.5)[:3], 1e-14)


@each_flatten
@pytest.mark.parametrize("master_weights", [True, False])
def test_a_16_bit_parameter_is_ema_updated_from_its_master_weight(master_weights, flatten):
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    optimizer = FusedEmaAdam([weight], lr=1e-3, ema_decay=0.75, master_weights=master_weights, flatten=flatten)
    step_with(optimizer)
    state = optimizer.state[weight]
    average, truth = state["ema_params"].clone(), state.get("master_params", weight.detach())
    weight.grad = None
    optimizer.step()
    torch.testing.assert_close(state["ema_params"], average.lerp(truth, 0.25), rtol=0, atol=0)
    with torch.no_grad():
        weight.fill_(5.0)
    optimizer.step()
    assert (state["ema_params"] > 1.9).all()


@each_flatten
def test_parameters_that_never_had_a_gradient_keep_their_weights_and_get_no_state(flatten):
    model = Weights()
    before, skipped = weights_of(model)[::2], list(model.parameters())[::2]
    optimizer = FusedEmaAdam(model.parameters(), flatten=flatten)
    model.set_gradients(0)
    for weight in skipped:
        weight.grad = None
    optimizer.step()
    assert_all_equal([weight.detach() for weight in skipped], before)
    assert not any(weight in optimizer.state for weight in skipped)


@each_flatten
def test_a_step_skipped_by_a_scaler_updates_no_average(flatten):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = FusedEmaAdam(weights, lr=0.1, ema_decay=0.5, flatten=flatten)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step_with(optimizer)
    before = states_of(optimizer)
    weights[1].grad = None
    scaler.scale(weights[0].sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert_all_equal(states_of(optimizer), before)


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reset_averages_start_from_the_weights(dtype, flatten):
    model, optimizer = trained(dtype, lr=0.1, ema_decay=0.9999, flatten=flatten)
    with torch.no_grad():
        next(model.parameters()).fill_(3.0)  # by somebody else, so its master has to follow
    steps = [int(state["step"]) for state in optimizer.state.values()]
    optimizer.reset_ema_params()
    states = [optimizer.state[weight] for weight in model.parameters()]
    weights = [state.get("master_params", weight) for state, weight in zip(states, weights_of(model), strict=True)]
    assert_all_equal([state["ema_params"] for state in states], weights)
    assert (states[0]["ema_params"] == 3).all() and [int(state["step"]) for state in states] == steps


def test_unwrap_returns_the_optimizer_inside_wrappers():
    optimizer = FusedEmaAdam(Weights().parameters())
    assert unwrap(SimpleNamespace(optimizer=SimpleNamespace(optim=optimizer))) is optimizer


def test_unwrapping_another_optimizer_raises():
    adamw = torch.optim.AdamW(Weights().parameters())
    for optimizer in (adamw, SimpleNamespace(optimizer=adamw)):
        with pytest.raises(TypeError, match="^unwrap: optimizer must be a FusedEmaAdam or have one inside"):
            unwrap(optimizer)
