"""FusedEmaAdam with 16-bit parameters and scaled gradients: float32 states, and skipped steps."""

import copy
from contextlib import nullcontext

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import (
    STATE,
    assert_all_close,
    assert_same,
    each_dtype,
    each_flatten,
    step_with,
    train,
    trained,
    unchanged,
)

HALF = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALF)


@each_flatten
@each_dtype
@pytest.mark.parametrize("master_weights", [True, False])
def test_states_have_torchs_keys_and_master_weights_of_16_bits_are_float32(dtype, master_weights, flatten):
    model, optimizer = trained(dtype, master_weights=master_weights, flatten=flatten)
    has_masters = master_weights and dtype in HALF
    for weight in model.parameters():
        step, *others = states = optimizer.state[weight]
        assert set(states) == {*STATE, *["master_params"] * has_masters}
        assert states[step].dtype == torch.int64 and states[step].device == weight.device and states[step] == 3
        for name in others:
            assert states[name].dtype == (torch.float32 if has_masters else dtype)
            assert states[name].shape == weight.shape and not states[name].requires_grad
        assert not has_masters or torch.equal(states["master_params"].to(dtype), weight.detach())


@each_flatten
@each_half
def test_in_place_changes_of_a_parameter_reach_its_master_weight(dtype, flatten):
    weight = nn.Parameter(torch.full((3,), 0.123, dtype=dtype))
    optimizer = FusedEmaAdam([weight], lr=1e-4, weight_decay=0.0, flatten=flatten)
    step_with(optimizer)
    kept = optimizer.state[weight]["master_params"].clone()
    with torch.no_grad():
        weight[1] = 4.0
    optimizer.param_groups[0]["lr"] = 0.0
    step_with(optimizer, 0.0)
    expected = torch.stack([kept[0], torch.tensor(4.0), kept[2]])
    assert torch.equal(optimizer.state[weight]["master_params"], expected)
    assert torch.equal(weight.detach(), expected.to(dtype))


@each_half
@pytest.mark.every_nth_case(2)
def test_a_step_that_inductor_compiles_keeps_the_precision_of_the_master_weights(dtype):
    masters = []
    for is_compiled in (True, False):
        weight = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = FusedEmaAdam([weight], lr=1e-4, weight_decay=0.0, ema_decay=0.9)
        step = torch.compile(optimizer.step, fullgraph=True) if is_compiled else optimizer.step
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            step()
        masters += [optimizer.state[weight][name] for name in ("master_params", "ema_params")]
    assert_all_close(masters[:2], masters[2:], 1e-6)
    assert masters[0][0] < 1 - 19e-4  # in each step, the weights move by less than their rounding


@each_flatten
@pytest.mark.parametrize("change", ["in place", "new data"])
@pytest.mark.parametrize("has_grad", [True, False], ids=["gradient", "no gradient"])
@pytest.mark.every_nth_case(3)
def test_a_compiled_step_continues_from_changed_parameters(change, has_grad, flatten):
    weight, other = (nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = FusedEmaAdam([weight, other], lr=0.0, ema_decay=0.0, flatten=flatten)
    for param in (weight, other):
        param.grad = torch.ones_like(param)
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    step()
    weight.grad = torch.ones_like(weight) if has_grad else None
    step()
    if change == "in place":
        with torch.no_grad():
            weight.fill_(4.0)
    else:
        weight.data = torch.full_like(weight, 4.0)
    step()
    expected = torch.full((3,), 4.0)
    assert torch.equal(weight.detach(), expected.bfloat16())
    assert torch.equal(optimizer.state[weight]["master_params"], expected)
    assert torch.equal(optimizer.state[weight]["ema_params"], expected)


@each_flatten
@each_half
def test_a_write_through_data_is_overwritten(dtype, flatten):
    weight = nn.Parameter(torch.arange(9, dtype=dtype).view(3, 3))
    optimizer = FusedEmaAdam([weight], lr=0.0, weight_decay=0.0, flatten=flatten)
    step_with(optimizer, 0.0)
    weight.data.fill_(4.0)
    optimizer.step()
    expected = torch.arange(9.0).view(3, 3)
    assert torch.equal(optimizer.state[weight]["master_params"], expected)
    assert torch.equal(weight.detach(), expected.to(dtype))


def scaled_run(dtype, infinite_steps, flatten, steps=6, **options):
    """Train under a GradScaler with an infinite gradient in some steps. Return the optimizer and the other steps."""
    model, optimizer = trained(dtype, 0, **options, flatten=flatten)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    count = 0
    for step in range(steps):
        scaler.scale(torch.ones(()))
        model.set_gradients(count)
        for weight in model.parameters():
            weight.grad *= scaler.get_scale()
        if step in infinite_steps:
            next(model.parameters()).grad[0, 0] = float("inf")
        else:
            count += 1
        with unchanged(optimizer) if step in infinite_steps else nullcontext():
            scaler.step(optimizer)
        scaler.update()
    return optimizer, count


@pytest.mark.parametrize("options", [{}, {"ema_warmup": "ratio"}, {"ema_update_every": 2}], ids=str)
@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("infinite_steps", [(), (0,), (0, 1, 3)], ids=str)
def test_with_a_grad_scaler_a_step_is_unscaled_or_skipped(infinite_steps, dtype, flatten, options):
    optimizer, count = scaled_run(dtype, infinite_steps, flatten, **options)
    assert_same(optimizer, trained(dtype, count, **options, flatten=flatten)[1])


@pytest.mark.parametrize("options", [{}, {"master_weights": False}], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["as the weight", "transposed"])
@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_scaled_step_unscales_the_gradients_in_place_as_torchs_fused_adamw(dtype, flatten, is_transposed, options):
    weight = nn.Parameter(torch.ones(3, 7, dtype=dtype))
    optimizer = FusedEmaAdam([weight], flatten=flatten, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        weight.grad = None
        scaler.scale(weight.sum()).backward()
        if is_transposed:
            weight.grad = weight.grad.t().contiguous().t()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight.grad, torch.ones_like(weight))


@each_flatten
def test_a_grad_scale_that_a_program_sets_applies_to_all_steps_as_in_torchs_fused_adamw(flatten):
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    options = {"lr": 0.1, "eps": 1.0}
    for each in (
        FusedEmaAdam(weights[:1], flatten=flatten, **options),
        torch.optim.AdamW(weights[1:], **options, fused=True),
    ):
        each.grad_scale = torch.tensor(4.0)
        for _ in range(3):
            step_with(each, 8.0)
    torch.testing.assert_close(*weights)


def test_gradients_that_were_unscaled_and_clipped_are_not_unscaled_again():
    weight = nn.Parameter(torch.ones(4))
    optimizer = FusedEmaAdam([weight], lr=0.1, betas=(0.0, 0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum() * 3).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    assert optimizer.state[weight]["exp_avg"].norm() == pytest.approx(1)


@each_flatten
def test_a_scaled_step_without_any_gradient_updates_the_averages(flatten):
    weight = nn.Parameter(torch.ones(4))
    optimizer = FusedEmaAdam([weight], lr=0.1, ema_decay=0.5, flatten=flatten)
    step_with(optimizer)
    optimizer.zero_grad()
    expected = (weight + optimizer.state[weight]["ema_params"]).detach() / 2
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)  # without a gradient, found_inf has no tensor
    torch.testing.assert_close(optimizer.state[weight]["ema_params"], expected)


@each_flatten
@each_half
def test_master_weights_of_a_state_without_averages_are_kept(dtype, flatten):
    (model, optimizer), (other_model, other) = (trained(dtype, steps, flatten=flatten) for steps in (3, 0))
    contents = copy.deepcopy(optimizer.state_dict())
    for state in contents["state"].values():
        del state["ema_params"]
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(contents)
    for each, its_optimizer in ((model, optimizer), (other_model, other)):
        train(each, its_optimizer, range(3, 4))
    for weight, other_weight in zip(model.parameters(), other_model.parameters(), strict=True):
        expected = optimizer.state[weight]["master_params"]
        assert torch.equal(other.state[other_weight]["master_params"], expected)


@each_flatten
def test_an_assigned_master_weights_takes_effect_in_the_next_step(flatten):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedEmaAdam([weight], lr=0.1, flatten=flatten)
    found = []
    for master_weights in (True, False, True):
        optimizer.param_groups[0]["master_weights"] = master_weights
        step_with(optimizer)
        found.append({value.dtype for name, value in optimizer.state[weight].items() if name != "step"})
    assert found == [{torch.float32}, {torch.bfloat16}, {torch.float32}]
    assert optimizer.state[weight]["step"] == 3
