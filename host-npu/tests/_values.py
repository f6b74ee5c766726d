"""Random inputs of operators, tolerances relative to float64, and expected refusals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# The relative error of one rounding.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 1.01 * 2**-11, torch.bfloat16: 1.01 * 2**-8}
# The error of float32 sums that are rounded once, relative to the largest.
_OF_LARGEST = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
DTYPES = pytest.mark.parametrize("dtype", _ROUNDING, ids=str)


def random(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Return numbers between two bounds."""
    return torch.empty(shape).uniform_(low, high).to(dtype)


def moved(values: Any) -> Any:
    """Return values with their tensors on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.npu(), values)


def called(function: Callable[..., Any], *arguments: object, **options: object) -> Any:
    """Return the result of a function for tensors on the device."""
    return function(*moved(arguments), **moved(options))


def transposed(tensor: Tensor) -> Tensor:
    """Return the tensor on the device with transposed strides and a storage offset of 1."""
    if tensor.dim() < 2:
        return tensor.npu()
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    view = storage[1:].view(tensor.mT.shape).mT
    view.copy_(tensor)
    return storage.npu()[1:].view(tensor.mT.shape).mT


@contextmanager
def refused(sentence: str) -> Iterator[None]:
    """Expect an error of a call or of the next synchronization, after which the device continues."""
    with pytest.raises(RuntimeError, match=sentence):
        yield
        torch.npu.synchronize()
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


def leaves(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return leaf tensors on the device, and in float64 on the host."""
    return [each.npu().requires_grad_() for each in tensors], [each.double().requires_grad_() for each in tensors]


def backward(result: Tensor, expected: Tensor) -> None:
    """Backpropagate the same random gradient through two results."""
    weight = torch.randn(expected.shape).to(result.dtype)
    result.backward(weight.npu())
    expected.backward(weight.double())


def assert_gradients(
    result: Tensor, expected: Tensor, on_npu: list[Tensor], wide: list[Tensor], units: float = 1
) -> None:
    """Assert that the gradients of two results are close, for the same random gradient."""
    backward(result, expected)
    for actual, wanted in zip(on_npu, wide, strict=True):
        assert_near(actual.grad, wanted.grad, units)


def assert_close(actual: Tensor, expected: Tensor, roundings: float = 1, dtype: torch.dtype | None = None) -> None:
    """Assert that numbers are within some roundings of a dtype, by default their own; numbers below 1 count as 1."""
    limit = roundings * _ROUNDING[dtype or actual.dtype] * expected.abs().clamp(min=1)
    wide = actual.cpu().double()
    assert actual.shape == expected.shape
    assert ((wide - expected).abs() <= limit).all(), (wide - expected).abs().max()


def assert_near(
    actual: Tensor | None, expected: Tensor | None, units: float = 1, dtype: torch.dtype | None = None
) -> None:
    """Assert that sums are within some units of a dtype, by default their own, relative to their largest."""
    assert actual is not None and expected is not None
    assert actual.shape == expected.shape
    limit = units * _OF_LARGEST[dtype or actual.dtype] * (expected.abs().max().item() if expected.numel() else 0)
    torch.testing.assert_close(actual.detach().cpu().double(), expected.detach(), rtol=0, atol=limit)


def assert_quantized(actual: Tensor, exact: Tensor, limit: float = 1e-3) -> None:
    """Assert that int8 numbers are the exact ones rounded to nearest; ties may round either way."""
    assert actual.dtype == torch.int8 and actual.shape == exact.shape
    assert (actual.cpu().double() - exact.clamp(-128, 127)).abs().max() <= 0.5 + limit


def assert_rows_quantized(actual: Tensor, scale: Tensor, exact: Tensor, limit: float = 1e-3) -> None:
    """Assert the same for rows with scales that map the largest number to 127."""
    expected = exact.abs().amax(-1) / 127
    torch.testing.assert_close(scale.cpu().double().view(expected.shape), expected, rtol=1e-6, atol=0)
    assert_quantized(actual, exact / expected[..., None], limit)
