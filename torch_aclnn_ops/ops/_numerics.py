"""The arithmetic rules that the formulas share."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from torch_aclnn_ops._torch_compat import is_any_autocast_enabled, is_autocast_available

import torch
from torch import Tensor

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


HALF_DTYPES = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that an operator computes in: float64 for float64, else float32, as the device does."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(tensor: Tensor) -> Tensor:
    """Cast to the dtype that the operator computes in, so that a formula rounds to 16 bits once, at its end."""
    return tensor.to(accumulation_dtype(tensor.dtype))


@contextmanager
def autocast_disabled(device_type: str) -> Iterator[None]:
    """Run a formula as written where autocast is on: it would make its matrix products 16-bit ones."""
    if is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            yield
    else:
        yield


def without_autocast(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Run a function as written where autocast is on: it would make the formulas' matrix products 16-bit ones."""

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not is_any_autocast_enabled():
            return function(*args, **kwargs)
        tensor = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))
        with autocast_disabled(tensor.device.type):
            return function(*args, **kwargs)

    return run
