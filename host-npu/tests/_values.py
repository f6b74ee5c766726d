"""Numbers for operators, and how near to float64's the results are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

# One rounding, relative.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 1.01 * 2**-11, torch.bfloat16: 1.01 * 2**-8}
# Of sums in float32 that are rounded once, relative to the largest.
_OF_LARGEST = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
DTYPES = pytest.mark.parametrize("dtype", _ROUNDING, ids=str)


def random(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    """Return numbers between two bounds."""
    return torch.empty(shape).uniform_(low, high).to(dtype)


def moved(values: Any) -> Any:
    """Return values with their tensors on the device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.npu(), values)


def called(function: Callable[..., Any], *arguments: object, **options: object) -> Any:
    """Return what a function returns for tensors on the device."""
    return function(*moved(arguments), **moved(options))


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return it on the device, with its last two dimensions in the other order and one element into its storage."""
    if tensor.dim() < 2:
        return tensor.npu()
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    view = storage[1:].view(tensor.mT.shape).mT
    view.copy_(tensor)
    return storage.npu()[1:].view(tensor.mT.shape).mT


def backward(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compute the gradients of what two results were made of, from the same random gradient."""
    weight = torch.randn(expected.shape).to(result.dtype)
    result.backward(weight.npu())
    expected.backward(weight.double())


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, roundings: float = 1, dtype: torch.dtype | None = None
) -> None:
    """Assert that numbers are within some roundings of a dtype, by default their own; below 1, of those of 1."""
    limit = roundings * _ROUNDING[dtype or actual.dtype] * expected.abs().clamp(min=1)
    wide = actual.cpu().double()
    assert actual.shape == expected.shape
    assert ((wide - expected).abs() <= limit).all(), (wide - expected).abs().max()


def assert_near(
    actual: torch.Tensor | None, expected: torch.Tensor | None, units: float = 1, dtype: torch.dtype | None = None
) -> None:
    """Assert that sums are within some units of a dtype, by default their own, relative to the largest of them."""
    assert actual is not None and expected is not None
    assert actual.shape == expected.shape
    limit = units * _OF_LARGEST[dtype or actual.dtype] * (expected.abs().max().item() if expected.numel() else 0)
    torch.testing.assert_close(actual.detach().cpu().double(), expected.detach(), rtol=0, atol=limit)
