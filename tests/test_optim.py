"""FusedEmaAdam equals AdamW, or Adam, and the EMA of swa_utils, on both of its paths."""

from __future__ import annotations

import copy

from torch_aclnn_ops.functional import ema_adam, fused_ema_adam
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
    averages_of,
    each_dtype,
    states_of,
    train,
    train_with_torch,
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


@pytest.mark.parametrize("ema_decay", [0.0, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("options", TORCH_OPTIONS.values(), ids=TORCH_OPTIONS)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
# After 50 steps of size lr float64 agrees to 1e-12; float32 has 29 bits less.
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.usefixtures("path")
def test_50_steps_equal_torchs_and_the_average_equals_swa_utils(dtype, atol, decoupled, options, ema_decay):
    mine, theirs = Weights(dtype), Weights(dtype)
    options = {"lr": 1e-2, "weight_decay": 1e-2, **options}
    optimizer = FusedEmaAdam(mine.parameters(), **options, ema_decay=ema_decay, decoupled_weight_decay=decoupled)
    train(mine, optimizer, range(50))
    adam = torch.optim.AdamW if decoupled else torch.optim.Adam
    averages = train_with_torch(theirs, adam(theirs.parameters(), **options), range(50), ema_decay)
    assert_all_close(weights_of(mine), weights_of(theirs), atol)
    assert_all_close(averages_of(mine, optimizer), averages, atol)


def test_defaults_are_adamws():
    mine, theirs = Weights(), Weights()
    optimizer = FusedEmaAdam(mine.parameters())
    train(mine, optimizer, range(5))
    averages = train_with_torch(theirs, torch.optim.AdamW(theirs.parameters()), range(5), 0.9999)
    assert_all_close(weights_of(mine), weights_of(theirs), 1e-14)
    assert_all_close(averages_of(mine, optimizer), averages, 1e-14)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "OneCycleLR, which moves betas too": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
}


@pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2, dtype=torch.float64)], ids=["float", "tensor"])
def test_a_scheduler_drives_it_as_it_drives_adamw(make_scheduler, lr):
    mine, theirs = Weights(), Weights()
    optimizer = FusedEmaAdam(mine.parameters(), lr=copy.deepcopy(lr), ema_decay=0.9)
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
            monkeypatch.setattr(ema_adam, "_has_native_kernel", lambda *_: False)
        model = Weights(dtype)
        optimizer = FusedEmaAdam(
            model.parameters(),
            **SETTINGS,
            decoupled_weight_decay=decoupled,
            bias_correction=bias_correction,
            maximize=maximize,
        )
        train(model, optimizer, range(5))
        outcomes.append(weights_of(model) + states_of(optimizer))
    for native, operator in zip(*outcomes, strict=True):
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(native, operator, rtol=tolerance, atol=tolerance)


def _as_is(tensor):
    return tensor


def _channels_last(tensor):
    return tensor.to(memory_format=torch.channels_last)


def _transposed(tensor):
    return tensor.mT.contiguous().mT


def _with_gaps(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def _expanded(tensor):
    return tensor[:1].expand_as(tensor)


# torch's kernels take tensors in the order of memory, so they are right for the first two only.
@pytest.mark.parametrize(
    "of_weight, of_gradient, is_native",
    [
        (_as_is, _as_is, True),
        (_channels_last, _channels_last, True),
        (_channels_last, _as_is, False),
        (_as_is, _channels_last, False),
        (_as_is, _transposed, False),
        (_as_is, _expanded, False),
        (_transposed, _transposed, False),
        (_with_gaps, _as_is, False),
    ],
)
def test_layouts_do_not_change_the_step(of_weight, of_gradient, is_native):
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, expected = nn.Parameter(of_weight(start.clone())), nn.Parameter(start.clone())
    optimizer, expected_optimizer = FusedEmaAdam([weight], **SETTINGS), FusedEmaAdam([expected], **SETTINGS)
    for _ in range(3):
        weight.grad = of_gradient(gradient)
        expected.grad = weight.grad.contiguous()
        optimizer.step()
        expected_optimizer.step()
    assert ema_adam._has_native_kernel(weight, weight.grad, *list(optimizer.state[weight].values())[1:]) == is_native
    assert_all_close([weight, *states_of(optimizer)], [expected, *states_of(expected_optimizer)], 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_go_through_the_operator(dtype):
    weight = nn.Parameter(torch.linspace(-1, 1, 100).to(dtype))
    weight.grad = torch.linspace(-1, 2, 100).to(dtype)
    var, m, v, s = weight.detach().clone(), *torch.zeros(2, 100, dtype=dtype), weight.detach().clone()
    options = {**OPTIONS, "weight_decay_mode": 1}
    del options["decoupled_weight_decay"], options["maximize"]
    optimizer = FusedEmaAdam([weight], **SETTINGS)
    for step in range(1, 4):
        optimizer.step()
        ema_adam.apply_fused_ema_adam_(weight.grad, var, m, v, s, torch.tensor(step), **options)
    assert_all_equal([weight.detach(), *states_of(optimizer)], [var, torch.tensor(3), m, v, s])


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
    # Tensors on the meta device have no values, so to ask for one raises.
    weight = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = FusedEmaAdam([weight])
    weight.grad = torch.empty(3, device="meta")
    optimizer.step()
    optimizer.step()
    assert optimizer.state[weight]["step"].device == weight.device


def test_torchs_cpu_kernels_are_for_the_cpu():
    assert ema_adam._has_native_kernel(*torch.ones(5, 3))
    assert not ema_adam._has_native_kernel(*torch.ones(5, 3, device="meta"))


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
    assert_all_equal(weights_of(mine) + states_of(optimizer), weights_of(theirs) + states_of(expected))


LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "ema_params", "steps")


def make_lists(dtype=torch.float32):
    weights = [weight.detach().clone() for weight in Weights(dtype).parameters()]
    lists = {
        "params": weights,
        "grads": [weight / 2 for weight in weights],
        "exp_avgs": [torch.zeros_like(weight) for weight in weights],
        "exp_avg_sqs": [torch.zeros_like(weight) for weight in weights],
        "ema_params": [weight.clone() for weight in weights],
        "steps": [torch.tensor(0) for _ in weights],
    }
    assert tuple(lists) == LISTS
    return lists


@each_dtype
def test_the_function_is_the_step_of_the_class(dtype):
    model = Weights(dtype)
    for weight in model.parameters():
        weight.grad = weight.detach() / 2
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    lists = make_lists(dtype)
    for _ in range(3):
        optimizer.step()
        fused_ema_adam(**lists, **OPTIONS)
    assert_all_equal(lists["params"], weights_of(model))
    assert_all_equal(lists["ema_params"], averages_of(model, optimizer))
    assert all(step == 3 for step in lists["steps"])


def test_the_function_takes_parameters_that_require_grad():
    lists = make_lists()
    lists["params"] = [nn.Parameter(weight) for weight in lists["params"]]
    fused_ema_adam(**lists, **OPTIONS)
    assert all(weight.grad_fn is None for weight in lists["params"])


def test_the_function_takes_empty_lists():
    fused_ema_adam([], [], [], [], [], [], **OPTIONS)


BAD_TENSORS = {
    **{
        f"{name} has another {kind}": (name, tensor, rf"{name}\[3\] must be torch\.float32 \[5\] on cpu, as its")
        for name in LISTS[1:-1]
        for kind, tensor in (
            ("dtype", torch.zeros(5, dtype=torch.float64)),
            ("shape", torch.zeros(6)),
            ("device", torch.zeros(5, device="meta")),
        )
    },
    "sparse gradient": ("grads", torch.ones(5).to_sparse(), r"grads\[3\] must be dense, but it is torch\.sparse_coo"),
    "complex weights": ("params", torch.ones(5) * 1j, r"params\[3\] must have a real floating-point dtype, but it has"),
    **{
        f"{kind} step": ("steps", step, r"steps\[3\] must be one torch\.int64 on cpu, as its parameter is, but it is")
        for kind, step in (
            ("float", torch.tensor(0.0)),
            ("no", torch.zeros(0, dtype=torch.int64)),
            ("two-element", torch.zeros(2, dtype=torch.int64)),
            ("meta", torch.zeros((), dtype=torch.int64, device="meta")),
        )
    },
}


@pytest.mark.parametrize("name, tensor, sentence", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_the_function_refuses_and_changes_nothing(name, tensor, sentence):
    lists, before = make_lists(), make_lists()
    lists[name][3] = tensor
    with pytest.raises(ValueError, match=f"^fused_ema_adam: {sentence}"):
        fused_ema_adam(**lists, **OPTIONS)
    lists[name][3] = before[name][3]
    for one in LISTS:
        assert_all_equal(lists[one], before[one])


def test_the_function_refuses_complex_parameters():
    lists = {name: [torch.ones(2, dtype=torch.complex64)] for name in LISTS[:-1]}
    with pytest.raises(ValueError, match=r"^fused_ema_adam: params\[0\] must have a real floating-point dtype"):
        fused_ema_adam(**lists, steps=[torch.tensor(0)], **OPTIONS)


@pytest.mark.parametrize("name", LISTS[1:])
def test_the_function_refuses_lists_of_different_lengths(name):
    lists = make_lists()
    lists[name].pop()
    with pytest.raises(ValueError, match=f"^fused_ema_adam: {name} has 5 tensors, but params has 6$"):
        fused_ema_adam(**lists, **OPTIONS)


@pytest.mark.parametrize(
    "name, value", [("lr", -1.0), ("beta1", 1.0), ("beta2", -0.5), ("ema_decay", 2.0), ("eps", -1)]
)
def test_the_function_refuses_an_option_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, but it is {value}"):
        fused_ema_adam(**make_lists(), **{**OPTIONS, name: value})
