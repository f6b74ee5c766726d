"""fused_ema_adam: the step on lists of tensors, and its errors."""

from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import OPTIONS, SETTINGS, Weights, assert_all_equal, averages_of, each_dtype, weights_of

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
def test_the_function_equals_the_step_of_the_class(dtype):
    model = Weights(dtype)
    for weight in model.parameters():
        weight.grad = weight.detach() / 2
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS, master_weights=False)
    lists = make_lists(dtype)
    for _ in range(3):
        optimizer.step()
        fused_ema_adam(**lists, **OPTIONS)
    assert_all_equal(lists["params"], weights_of(model))
    assert_all_equal(lists["ema_params"], averages_of(model, optimizer))
    assert all(step == 3 for step in lists["steps"])


def test_the_function_accepts_parameters_that_require_grad():
    lists = make_lists()
    lists["params"] = [nn.Parameter(weight) for weight in lists["params"]]
    fused_ema_adam(**lists, **OPTIONS)
    assert all(weight.grad_fn is None for weight in lists["params"])


def test_the_function_accepts_empty_lists():
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
        f"{kind} step": ("steps", step, r"steps\[3\] must be a torch\.int64 tensor .* on cpu, like its parameter, but")
        for kind, step in (
            ("float", torch.tensor(0.0)),
            ("no", torch.zeros(0, dtype=torch.int64)),
            ("two-element", torch.zeros(2, dtype=torch.int64)),
            ("meta", torch.zeros((), dtype=torch.int64, device="meta")),
        )
    },
}


@pytest.mark.parametrize("name, tensor, sentence", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_the_function_raises_and_changes_nothing(name, tensor, sentence):
    lists, before = make_lists(), make_lists()
    lists[name][3] = tensor
    with pytest.raises(ValueError, match=f"^fused_ema_adam: {sentence}"):
        fused_ema_adam(**lists, **OPTIONS)
    lists[name][3] = before[name][3]
    for one in LISTS:
        assert_all_equal(lists[one], before[one])


def test_the_function_raises_for_complex_parameters():
    lists = {name: [torch.ones(2, dtype=torch.complex64)] for name in LISTS[:-1]}
    with pytest.raises(ValueError, match=r"^fused_ema_adam: params\[0\] must have a real floating-point dtype"):
        fused_ema_adam(**lists, steps=[torch.tensor(0)], **OPTIONS)


@pytest.mark.parametrize("name", LISTS[1:])
def test_the_function_raises_for_lists_of_different_lengths(name):
    lists = make_lists()
    lists[name].pop()
    with pytest.raises(ValueError, match=f"^fused_ema_adam: {name} has 5 tensors, but params has 6$"):
        fused_ema_adam(**lists, **OPTIONS)


@pytest.mark.parametrize("name, value", {"lr": -1.0, "beta1": 1.0, "beta2": -0.5, "ema_decay": 2.0, "eps": -1}.items())
def test_the_function_raises_for_an_option_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, but it is {value}"):
        fused_ema_adam(**make_lists(), **{**OPTIONS, name: value})


@pytest.mark.parametrize("name, value", [("grad_scale", 2.0), ("found_inf", torch.zeros(2))])
def test_the_function_raises_for_a_grad_scale_that_is_not_a_one_element_tensor(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a tensor with one element or None, but it is"):
        fused_ema_adam(**make_lists(), **OPTIONS, **{name: value})
