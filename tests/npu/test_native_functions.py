"""The extension's autograd functions, which serve eager calls, against torch's functions on a CPU."""

from torch_aclnn_ops import functional as ours

import pytest
import torch

from tests._contract import HALF_DTYPES

_WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0])


def _losses(function, reduction, input, target):
    options = {"weight": _WEIGHT.to(input)} if function == "binary_cross_entropy" else {}
    return lambda F: getattr(F, function)(input, target, reduction=reduction, **options)


@pytest.mark.parametrize("needs_target", [False, True], ids=["input", "input and target"])
@pytest.mark.parametrize("needs_input", [False, True], ids=["", "with input"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("function", ["mse_loss", "binary_cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_a_loss_has_the_gradients_that_are_needed(function, reduction, needs_input, needs_target, dtype):
    values = torch.tensor([0.1, 0.5, 0.75, 0.9]), torch.tensor([0.25, 1.0, 0.0, 0.5])
    results = []
    for F, device in ((torch.nn.functional, "cpu"), (ours, "npu")):
        wide = torch.float32 if device == "cpu" else dtype
        input, target = (value.to(dtype).to(device, wide, copy=True) for value in values)
        input, target = input.requires_grad_(needs_input), target.requires_grad_(needs_target)
        loss = _losses(function, reduction, input, target)(F)
        assert loss.requires_grad == (needs_input or needs_target)
        if loss.requires_grad:
            loss.sum().backward()
        results.append((loss.detach(), input.grad, target.grad))
    for expected, result in zip(*results, strict=True):
        assert (expected is None) == (result is None)
        if expected is not None:
            torch.testing.assert_close(result.cpu().float(), expected, rtol=8 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("function", ["mse_loss", "binary_cross_entropy"])
def test_autocast_runs_a_loss_in_float32(function):
    values = torch.tensor([0.1, 0.5, 0.75, 0.9]), torch.tensor([0.25, 1.0, 0.0, 0.5])
    input, target = (value.to("npu", torch.bfloat16) for value in values)
    input.requires_grad_()
    with torch.autocast("npu", dtype=torch.bfloat16):
        loss = _losses(function, "mean", input, target.float())(ours)
        loss.backward()
    assert loss.dtype == torch.float32
    wide = input.detach().cpu().float().requires_grad_()
    expected = _losses(function, "mean", wide, target.cpu().float())(torch.nn.functional)
    expected.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(input.grad.cpu(), wide.grad.bfloat16())


def test_an_eager_embedding_uses_the_function_of_the_extension():
    weight = torch.rand(5, 3).npu().requires_grad_()
    rows = ours.embedding(torch.tensor([0, 4, 4]).npu(), weight)
    assert "torch_aclnn_ops" in rows.grad_fn.name()
