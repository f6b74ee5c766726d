"""FusedEmaAdam equals AdamW, or Adam, and the EMA of swa_utils, with all of its kernels."""

import copy
import functools

from torch_aclnn_ops.ops.ema_adam import kernels
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests._optim import (
    DTYPES,
    OPTIONS,
    SETTINGS,
    Weights,
    assert_all_close,
    assert_all_equal,
    assert_same,
    averaged_model,
    averages_of,
    contents_of,
    each_flatten,
    step_with,
    train,
    train_with_torch,
    trained,
    weights_of,
)

TORCH_OPTIONS = {
    "defaults": {},
    "no weight decay": {"weight_decay": 0.0},
    "large weight decay": {"weight_decay": 0.5},
    "other betas": {"betas": (0.5, 0.9)},
    "no memory": {"betas": (0.0, 0.0)},
    "large eps": {"eps": 0.1},
    "maximize": {"maximize": True},
    "maximize, large weight decay": {"maximize": True, "weight_decay": 0.5},
}


STEPS = 200
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
# After 200 steps of size lr, float64 agrees to 1e-12; float32 has 29 bits less.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5}


@functools.cache
def of_torch(name, case, dtype, ema_decay):
    """Return the weights and their averages after training with torch."""
    model = Weights(dtype)
    optimizer = OPTIMIZERS[name](model.parameters(), **{"lr": 1e-2, "weight_decay": 1e-2, **TORCH_OPTIONS[case]})
    averages = train_with_torch(model, optimizer, range(STEPS), ema_decay)
    return weights_of(model), averages


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        # float64 runs every option; float32 runs the same code with more rounding.
        pytest.param(dtype, case, marks=[pytest.mark.exhaustive] if dtype.itemsize == 4 and case != "defaults" else [])
        for dtype in BOUNDS
        for case in TORCH_OPTIONS
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("path")
@pytest.mark.every_nth_case(8)
def test_200_steps_equal_torchs_and_the_average_equals_swa_utils(dtype, name, case):
    model = Weights(dtype)
    options = {"lr": 1e-2, "weight_decay": 1e-2, **TORCH_OPTIONS[case], "decoupled_weight_decay": name == "AdamW"}
    optimizer = FusedEmaAdam(model.parameters(), **options, ema_decay=0.99, ema_start_step=1)
    train(model, optimizer, range(STEPS))
    weights, averages = of_torch(name, case, dtype, 0.99)
    assert_all_close(weights_of(model), weights, BOUNDS[dtype])
    assert_all_close(averages_of(model, optimizer), averages, BOUNDS[dtype])


@pytest.mark.usefixtures("path")
def test_200_steps_of_bfloat16_parameters_equal_rounded_float32_parameters():
    # The gradients depend on the rounded weights, so the runs diverge, by less than the rounding of the weights.
    model = Weights(torch.bfloat16)
    optimizer = FusedEmaAdam(model.parameters(), lr=1e-2, weight_decay=1e-2, ema_decay=0.99, ema_start_step=1)
    wide = Weights(torch.bfloat16).float()
    adamw = torch.optim.AdamW(wide.parameters(), lr=1e-2, weight_decay=1e-2)
    theirs = averaged_model(wide, 0.99)
    for step in range(STEPS):
        train(model, optimizer, [step])
        for weight, other in zip(wide.parameters(), model.parameters(), strict=True):
            weight.grad = other.grad.float()
        adamw.step()
        theirs.update_parameters(wide)
    masters = [optimizer.state[weight]["master_params"] for weight in model.parameters()]
    assert_all_close(masters, weights_of(wide), 2e-5)
    assert_all_close(averages_of(model, optimizer), weights_of(theirs.module), 2e-5)
    assert_all_equal(weights_of(model), [master.bfloat16() for master in masters])


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_ema_start_step_1_weights_and_averages_equal_adamw_and_swa_utils_bit_for_bit(dtype, flatten):
    # The two sides of the diff in docs/migrate.md.
    theirs = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    mine = copy.deepcopy(theirs)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)
    averages = averaged_model(theirs, 0.999)
    optimizer = FusedEmaAdam(mine.parameters(), lr=1e-3, ema_decay=0.999, ema_start_step=1, flatten=flatten)
    for _ in range(20):
        rows = torch.randn(8, 16, dtype=dtype)
        for model, each in ((theirs, adamw), (mine, optimizer)):
            each.zero_grad()
            model(rows).square().sum().backward()
            each.step()
        averages.update_parameters(theirs)
    assert_all_equal(weights_of(mine), weights_of(theirs))
    assert_all_equal(averages_of(mine, optimizer), weights_of(averages.module))


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "OneCycleLR, which moves betas too": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
}


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2, dtype=torch.float64)], ids=["float", "tensor"])
def test_a_scheduler_works_as_with_adamw(make_scheduler, lr):
    mine, theirs = Weights(), Weights()
    optimizer = FusedEmaAdam(mine.parameters(), lr=copy.deepcopy(lr), ema_decay=0.9, ema_start_step=1)
    scheduler = make_scheduler(optimizer)
    for step in range(15):
        train(mine, optimizer, [step])
        scheduler.step()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=float(lr))
    averages = train_with_torch(theirs, adamw, range(15), 0.9, make_scheduler(adamw))
    assert_all_close(weights_of(mine), weights_of(theirs), 1e-12)
    assert_all_close(averages_of(mine, optimizer), averages, 1e-12)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torchs_cpu_kernels_equal_the_operator(monkeypatch, dtype, decoupled, bias_correction, maximize):
    outcomes = []
    for use_native in (True, False):
        if not use_native:
            monkeypatch.setattr(kernels, "_NATIVE_DTYPES", ())
        options = {"decoupled_weight_decay": decoupled, "bias_correction": bias_correction, "maximize": maximize}
        outcomes.append(contents_of(trained(dtype, 5, **options)[1]))
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(*outcomes, rtol=tolerance, atol=tolerance)


LAYOUTS = {
    "as is": lambda tensor: tensor,
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "with gaps": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "expanded": lambda tensor: tensor[:1].expand_as(tensor),
}


# torch's kernels process tensors in memory order, whatever their strides.
@pytest.mark.parametrize(
    "of_weight, of_gradient",
    [
        *(("as is", of_gradient) for of_gradient in ("as is", "channels last", "transposed", "expanded")),
        *(("channels last", of_gradient) for of_gradient in ("channels last", "as is")),
        ("transposed", "transposed"),
        ("with gaps", "as is"),
    ],
)
@each_flatten
def test_layouts_do_not_change_the_step(of_weight, of_gradient, flatten):
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, expected = nn.Parameter(LAYOUTS[of_weight](start.clone())), nn.Parameter(start.clone())
    strides = weight.stride()
    optimizer = FusedEmaAdam([weight], **SETTINGS, flatten=flatten)
    expected_optimizer = FusedEmaAdam([expected], **SETTINGS)
    for _ in range(3):
        weight.grad = LAYOUTS[of_gradient](gradient)
        expected.grad = weight.grad.contiguous()
        optimizer.step()
        expected_optimizer.step()
    states = list(optimizer.state[weight].values())[1:]
    assert kernels.has_native_kernel(weight, *states) == (of_weight != "with gaps") and weight.stride() == strides
    assert_all_close(contents_of(optimizer), contents_of(expected_optimizer), 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_without_master_weights_go_through_the_operator(dtype):
    weight = nn.Parameter(torch.linspace(-1, 1, 100).to(dtype))
    weight.grad = torch.linspace(-1, 2, 100).to(dtype)
    var, m, v, s = weight.detach().clone(), *torch.zeros(2, 100, dtype=dtype), weight.detach().clone()
    options = {**OPTIONS, "weight_decay_mode": 1}
    del options["decoupled_weight_decay"], options["maximize"]
    optimizer = FusedEmaAdam([weight], **SETTINGS, master_weights=False)
    for step in range(1, 4):
        optimizer.step()
        kernels.apply_fused_ema_adam_(weight.grad, var, m, v, s, torch.tensor(step), **options)
    assert_all_equal(contents_of(optimizer), [var, torch.tensor(3), m, v, s])


def test_dtypes_may_differ_between_the_parameters_of_a_group():
    models = [Weights(dtype) for dtype in DTYPES]
    alone = [Weights(dtype) for dtype in DTYPES]
    together = FusedEmaAdam([weight for model in models for weight in model.parameters()], **SETTINGS)
    optimizers = [FusedEmaAdam(model.parameters(), **SETTINGS) for model in alone]
    for step in range(3):
        for model in models:
            model.set_gradients(step)
        together.step()
        for model, optimizer in zip(alone, optimizers, strict=True):
            train(model, optimizer, [step])
    for model, other, optimizer in zip(models, alone, optimizers, strict=True):
        assert_all_equal(weights_of(model), weights_of(other))
        assert_all_equal(averages_of(model, together), averages_of(other, optimizer))


def test_a_step_reads_no_value_from_the_device():
    # Tensors on the meta device have no values, so reading one raises.
    weight = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = FusedEmaAdam([weight])
    for _ in range(2):
        step_with(optimizer)
    assert optimizer.state[weight]["step"].device == weight.device


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.usefixtures("path")
def test_the_default_device_does_not_matter(bias_correction):
    mine, theirs = Weights(), Weights()
    optimizer = FusedEmaAdam(mine.parameters(), bias_correction=bias_correction)
    expected = FusedEmaAdam(theirs.parameters(), bias_correction=bias_correction)
    for model in (mine, theirs):
        model.set_gradients(0)
    with torch.device("meta"):
        optimizer.step()
    expected.step()
    assert_same(optimizer, expected)
