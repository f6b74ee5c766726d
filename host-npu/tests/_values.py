"""Numbers for operators, how near to float64's the results are, and what is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# One rounding, relative.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 1.01 * 2**-11, torch.bfloat16: 1.01 * 2**-8}
# Of sums in float32 that are rounded once, relative to the largest.
_OF_LARGEST = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
DTYPES = pytest.mark.parametrize("dtype", _ROUNDING, ids=str)


def random(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Return numbers between two bounds."""
    return torch.empty(shape).uniform_(low, high).to(dtype)


def moved(values: Any) -> Any:
    """Return values with their tensors on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.npu(), values)


def called(function: Callable[..., Any], *arguments: object, **options: object) -> Any:
    """Return what a function returns for tensors on the device."""
    return function(*moved(arguments), **moved(options))


def transposed(tensor: Tensor) -> Tensor:
    """Return it on the device, with its last two dimensions in the other order and one element into its storage."""
    if tensor.dim() < 2:
        return tensor.npu()
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    view = storage[1:].view(tensor.mT.shape).mT
    view.copy_(tensor)
    return storage.npu()[1:].view(tensor.mT.shape).mT


@contextmanager
def refused(sentence: str) -> Iterator[None]:
    """Expect an error at a call or at the end of its stream, after which the device goes on."""
    with pytest.raises(RuntimeError, match=sentence):
        yield
        torch.npu.synchronize()
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


def leaves(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return tensors whose gradients are wanted, on the device, and in float64 on the host."""
    return [each.npu().requires_grad_() for each in tensors], [each.double().requires_grad_() for each in tensors]


def backward(result: Tensor, expected: Tensor) -> None:
    """Compute the gradients of what two results were made of, from the same random gradient."""
    weight = torch.randn(expected.shape).to(result.dtype)
    result.backward(weight.npu())
    expected.backward(weight.double())


def assert_gradients(
    result: Tensor, expected: Tensor, on_npu: list[Tensor], wide: list[Tensor], units: float = 1
) -> None:
    """Assert that gradients of two results, from the same random one, are near by what the results are made of."""
    backward(result, expected)
    for actual, wanted in zip(on_npu, wide, strict=True):
        assert_near(actual.grad, wanted.grad, units)


def assert_close(actual: Tensor, expected: Tensor, roundings: float = 1, dtype: torch.dtype | None = None) -> None:
    """Assert that numbers are within some roundings of a dtype, by default their own; below 1, of those of 1."""
    limit = roundings * _ROUNDING[dtype or actual.dtype] * expected.abs().clamp(min=1)
    wide = actual.cpu().double()
    assert actual.shape == expected.shape
    assert ((wide - expected).abs() <= limit).all(), (wide - expected).abs().max()


def assert_near(
    actual: Tensor | None, expected: Tensor | None, units: float = 1, dtype: torch.dtype | None = None
) -> None:
    """Assert that sums are within some units of a dtype, by default their own, relative to the largest of them."""
    assert actual is not None and expected is not None
    assert actual.shape == expected.shape
    limit = units * _OF_LARGEST[dtype or actual.dtype] * (expected.abs().max().item() if expected.numel() else 0)
    torch.testing.assert_close(actual.detach().cpu().double(), expected.detach(), rtol=0, atol=limit)


def assert_quantized(actual: Tensor, exact: Tensor, limit: float = 1e-3) -> None:
    """Assert that numbers in int8 are the nearest to exact ones, or where these are halves, a neighbour."""
    assert actual.dtype == torch.int8 and actual.shape == exact.shape
    assert (actual.cpu().double() - exact.clamp(-128, 127)).abs().max() <= 0.5 + limit


def assert_rows_quantized(actual: Tensor, scale: Tensor, exact: Tensor, limit: float = 1e-3) -> None:
    """Assert the same of rows, of which the scales make the largest number 127."""
    expected = exact.abs().amax(-1) / 127
    torch.testing.assert_close(scale.cpu().double().view(expected.shape), expected, rtol=1e-6, atol=0)
    assert_quantized(actual, exact / expected[..., None], limit)
