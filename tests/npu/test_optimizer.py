"""FusedEmaAdam on an NPU: the CPU's results, the launches per step, and no waiting for the device."""

from torch_aclnn_ops import disabled, explain, report
from torch_aclnn_ops.optim import FusedEmaAdam

import host_npu
import pytest
import torch
from torch import nn

from tests._optim import (
    SETTINGS,
    Weights,
    assert_all_close,
    assert_all_equal,
    averages_of,
    contents_of,
    each_flatten,
    params_of,
    states_of,
    step_with,
    train,
    weights_of,
)

OPERATOR = "aclnnApplyFusedEmaAdam"


def on_the_cpu(tensors):
    return [tensor.detach().cpu() for tensor in tensors]


def set_gradients(model, step, has_one=lambda i: True):
    """Set the gradients of the CPU's model, so that both devices get the same."""
    reference = Weights(next(model.parameters()).dtype)
    reference.set_gradients(step)
    for i, (weight, other) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
        weight.grad = other.grad.to(weight.device) if has_one(i) else None


def trained(device, dtype, steps, **options):
    model = Weights(dtype).to(device)
    optimizer = FusedEmaAdam(model.parameters(), **{**SETTINGS, **options})
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return model, optimizer


OPTIONS = {
    "AdamW": {},
    "L2 decay": {"decoupled_weight_decay": False, "weight_decay": 0.1},
    "no bias correction": {"bias_correction": False},
    "maximize": {"maximize": True},
    "warm-up by ratio": {"ema_warmup": "ratio", "ema_start_step": 3},
    "warm-up by power": {"ema_warmup": "power", "ema_update_every": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_20_steps_give_the_cpus_weights_and_averages(options, dtype):
    model, optimizer = trained("npu", dtype, 20, **options)
    expected, expected_optimizer = trained("cpu", dtype, 20, **options)
    # CANN's kernel rounds beta2 to float32, which leaves five digits of 1 - beta2, and without bias correction of the
    # updates, whose sum is below 1. 16-bit weights may round to the neighbor next to a tie.
    bound = 1e-5
    atol = bound if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert_all_close(on_the_cpu(weights_of(model)), weights_of(expected), atol)
    assert_all_close(on_the_cpu(averages_of(model, optimizer)), averages_of(expected, expected_optimizer), bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_flattened_weights_and_averages_are_the_same_bit_for_bit(options, dtype):
    pairs = [trained("npu", dtype, 20, **options, flatten=flatten) for flatten in (True, False)]
    assert_all_equal(*(on_the_cpu(weights_of(model)) for model, _ in pairs))
    assert_all_equal(*(on_the_cpu(averages_of(*pair)) for pair in pairs))


def launches_of(step):
    torch.npu.synchronize()
    host_npu.reset()
    step()
    torch.npu.synchronize()
    return host_npu.stats().launches.get(OPERATOR, 0)


def many(count, dtype=torch.float32, **options):
    weights = [nn.Parameter(torch.linspace(-1, i, 16).to("npu", dtype)) for i in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return weights, FusedEmaAdam(weights, **options)


@pytest.mark.simulator
@pytest.mark.parametrize("options", [{}, {"ema_warmup": "ratio"}, {"ema_update_every": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flattened_step_launches_the_operator_once_per_buffer(dtype, options):
    weights, optimizer = many(50, dtype, flatten=True, **options)
    assert [launches_of(optimizer.step) for _ in range(3)] == [1, 1, 1]
    optimizer.add_param_group({"params": [weight for weight in many(5, dtype)[0]]})
    for weight in optimizer.param_groups[1]["params"]:
        weight.grad = torch.ones_like(weight)
    assert launches_of(optimizer.step) == 2
    weights[20].grad = None  # splits the buffer
    assert launches_of(optimizer.step) == 3


@pytest.mark.simulator
def test_a_first_gradient_after_some_steps_launches_one_operator_more_in_a_flattened_step():
    weights, optimizer = many(10, flatten=True, ema_warmup="ratio")
    weights[9].grad = None
    assert [launches_of(optimizer.step) for _ in range(2)] == [1, 1]
    weights[9].grad = torch.ones_like(weights[9])
    assert [launches_of(optimizer.step) for _ in range(2)] == [2, 2]
    assert host_npu.stats().launches == {OPERATOR: 2}


def fail_on_synchronization(monkeypatch):
    def fail():
        raise AssertionError("the step waits for the device")

    for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda tensor, *args, original=original: original(tensor, *args) if tensor.is_cpu else fail(),
        )


@each_flatten
@pytest.mark.parametrize("options", [{}, {"ema_warmup": "ratio"}, {"ema_start_step": 2}], ids=str)
def test_scaled_steps_and_tensor_learning_rates_do_not_synchronize(monkeypatch, options, flatten):
    _, optimizer = many(3, flatten=flatten, lr=torch.tensor(0.1, device="npu"), **options)
    optimizer.step()  # creates buffers, and may wait
    fail_on_synchronization(monkeypatch)
    with pytest.raises(AssertionError, match="waits for the device"):
        optimizer.param_groups[0]["lr"].item()
    optimizer.step()
    optimizer.grad_scale = torch.tensor(4.0, device="npu")
    optimizer.found_inf = torch.tensor(0.0, device="npu")
    for _ in range(3):
        optimizer.step()


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"ema_warmup": "ratio", "ema_start_step": 1, "ema_update_every": 2}], ids=str)
def test_a_skipped_step_changes_nothing(options, dtype, flatten):
    skipping, other = (many(3, dtype, flatten=flatten, lr=0.1, **options) for _ in range(2))
    for is_skipped in (True, False, False, True, True, False, False):
        weights, optimizer = skipping
        before = contents_of(optimizer)
        for weight in weights:
            weight.grad = torch.full_like(weight, float("inf") if is_skipped else 2.0)
        optimizer.grad_scale = torch.tensor(4.0, device="npu")
        optimizer.found_inf = torch.tensor(float(is_skipped), device="npu")
        optimizer.step()
        if is_skipped:
            assert_all_equal(on_the_cpu(contents_of(optimizer)), on_the_cpu(before))
            continue
        step_with(other[1], 0.5)
    assert_all_equal(*(on_the_cpu(weights) for weights, _ in (skipping, other)))
    assert_all_close(on_the_cpu(states_of(skipping[1])), on_the_cpu(states_of(other[1])), 1e-6)


@each_flatten
def test_the_ema_starts_from_the_weights_of_the_first_step_that_is_not_skipped(flatten):
    weight = nn.Parameter(torch.ones(4, device="npu"))
    optimizer = FusedEmaAdam([weight], lr=0.0, ema_decay=0.5, flatten=flatten)
    for is_skipped, value in ((True, 1.0), (False, 5.0)):
        with torch.no_grad():
            weight.fill_(value)
        weight.grad = torch.ones_like(weight)
        optimizer.found_inf = torch.full((), float(is_skipped), device="npu")
        optimizer.step()
        assert is_skipped == (weight not in optimizer.state)
    assert (optimizer.state[weight]["ema_params"] == 5).all()


@pytest.mark.parametrize("package", [torch, torch.npu], ids=["torch", "torch_npu"])
@each_flatten
def test_a_grad_scaler_skips_a_step(flatten, package):
    weights, optimizer = many(3, flatten=flatten, lr=0.1)
    scaler = package.amp.GradScaler(**{"device": "npu"} if package is torch else {}, init_scale=4.0)
    before = on_the_cpu(weights)
    for value, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(sum((weight * value).sum() for weight in weights)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(weight.cpu(), start) != moves for weight, start in zip(weights, before, strict=True))
    assert all(int(optimizer.state[weight]["step"]) == 1 for weight in weights)
    torch.testing.assert_close(optimizer.state[weights[0]]["exp_avg"].cpu(), torch.full((16,), 0.1))


@each_flatten
def test_after_a_skipped_step_of_some_parameters_each_continues_from_its_own_step_count(flatten):
    first, second = (nn.Parameter(torch.ones(128, device="npu")) for _ in range(2))
    expected, expected_second = (nn.Parameter(torch.ones(128)) for _ in range(2))
    optimizer = FusedEmaAdam([first, second], lr=0.1, flatten=flatten)
    reference = torch.optim.AdamW([expected, expected_second], lr=0.1)
    steps = [((first, second), False), ((first,), False), ((second,), True), ((first, second), False)]
    pairs = {first: expected, second: expected_second}
    for i, (weights, is_skipped) in enumerate(steps):
        optimizer.found_inf = torch.full((), float(is_skipped), device="npu")
        optimizer.zero_grad()
        reference.zero_grad()
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 - i)
            pairs[weight].grad = None if is_skipped else weight.grad.cpu()
        optimizer.step()
        reference.step()
    assert_all_close([first.cpu(), second.cpu()], [expected, expected_second], 1e-6)


@each_flatten
def test_a_tensor_learning_rate_on_the_device_equals_the_number(flatten):
    pairs = [many(3, flatten=flatten, lr=lr) for lr in (torch.tensor(0.1, device="npu"), 0.1)]
    for _ in range(5):
        for _, optimizer in pairs:
            optimizer.step()
    torch.testing.assert_close(*(on_the_cpu(weights) for weights, _ in pairs), rtol=1e-6, atol=1e-6)


@each_flatten
def test_a_checkpoint_of_the_npu_resumes_on_the_cpu(flatten):
    model, optimizer = trained("npu", torch.bfloat16, 3, flatten=flatten)
    on_cpu = Weights(torch.bfloat16, seed=1)
    cpu_optimizer = FusedEmaAdam(on_cpu.parameters(), flatten=flatten)
    on_cpu.load_state_dict(model.state_dict())
    cpu_optimizer.load_state_dict(optimizer.state_dict())
    train(on_cpu, cpu_optimizer, [3])
    for weight in on_cpu.parameters():
        assert all(value.is_cpu for value in cpu_optimizer.state[weight].values())


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_averages_without_a_gradient_are_updated_as_on_the_cpu(options, dtype, flatten):
    results = []
    for device in ("npu", "cpu"):
        model, optimizer = trained(device, dtype, 0, **options, flatten=flatten)
        for step in range(8):
            set_gradients(model, step, lambda i, step=step: step == 0 or (step + i) % 3 != 0)
            optimizer.step()
        results.append(on_the_cpu(averages_of(model, optimizer)))
    assert_all_close(*results, 1e-6)


@each_flatten
def test_a_step_skipped_on_the_device_updates_no_average(flatten):
    _, optimizer = trained("npu", torch.float32, 1, flatten=flatten)
    params_of(optimizer)[0].grad = None
    before = states_of(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()).npu(), torch.ones(()).npu()
    optimizer.step()
    assert_all_equal(on_the_cpu(states_of(optimizer)), on_the_cpu(before))


def test_changes_of_parameters_on_the_device_reach_averages_on_the_host():
    param = nn.Parameter(torch.randn(4, dtype=torch.bfloat16, device="npu"))
    optimizer = FusedEmaAdam([param], lr=0.1, ema_decay=0.5)
    step_with(optimizer)
    state, weights = optimizer.state[param], param.detach().clone()
    state["ema_params"] = expected = state["ema_params"].cpu()
    expected = expected.clone()
    with optimizer.swap_ema_params(), torch.no_grad():
        param[0] = 5
    expected[0] = 5
    assert torch.equal(state["ema_params"], expected) and torch.equal(param, weights)


def test_averages_of_a_model_that_was_moved_are_exported_where_it_is(tmp_path):
    model = nn.Linear(3, 2).to("npu")
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    model(torch.ones(1, 3, device="npu")).sum().backward()
    optimizer.step()
    averages = on_the_cpu(averages_of(model, optimizer))
    model.cpu()
    optimizer.save_ema_model(model, tmp_path / "ema.pt")
    for contents in (optimizer.ema_state_dict(model), torch.load(tmp_path / "ema.pt")):
        assert all(value.is_cpu for value in contents.values())
        assert_all_equal(list(contents.values()), averages)


@each_flatten
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.every_nth_case(3)
def test_steps_of_a_disabled_package_launch_nothing_and_give_the_same_weights(is_compiled, flatten):
    expected, _ = trained("npu", torch.float32, 3, flatten=flatten)
    model, optimizer = trained("npu", torch.float32, 0, flatten=flatten)
    step = torch.compile(optimizer.step, backend="aot_eager") if is_compiled else optimizer.step
    with disabled(), report() as counts:
        for number in range(3):
            set_gradients(model, number)
            said = step() if is_compiled else explain(step)
            assert said in (None, "apply_fused_ema_adam_: PyTorch fallback, because torch_aclnn_ops is disabled")
    assert counts.as_dict()["launches"] == {}
    assert_all_close(on_the_cpu(weights_of(model)), on_the_cpu(weights_of(expected)), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_restart_from_the_weights_if_the_states_were_moved_to_the_host(dtype):
    model, optimizer = trained("npu", dtype, 2)
    for state in optimizer.state.values():
        state.update({name: value.cpu() for name, value in state.items()})
    optimizer.reset_ema_params()
    averages = [optimizer.state[weight]["ema_params"].to(dtype) for weight in model.parameters()]
    assert_all_equal(on_the_cpu(averages), on_the_cpu(weights_of(model)))


@pytest.mark.parametrize("which", [slice(None), slice(1, 2), slice(4, 5)], ids=["all states", "one state", "another"])
def test_states_with_new_data_are_used(which):
    results = []
    for replaces in (True, False):
        model, optimizer = trained("npu", torch.bfloat16, 2)
        tensors = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "ema_params")]
        aliases = [tensor.detach() for tensor in tensors]  # these hold the old data
        for tensor in tensors[which]:
            if replaces:
                tensor.data = 2 * tensor.data
            else:
                tensor.mul_(2)
        step_with(optimizer)
        with optimizer.swap_ema_params():
            averages = weights_of(model)
        results.append(on_the_cpu([*contents_of(optimizer), *averages]))
        del aliases
    assert_all_close(*results, 1e-6)
