"""Dtype and autocast rules shared by all implementations."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch_aclnn_ops._nested import leaves
from torch_aclnn_ops._torch_compat.private import is_any_autocast_enabled, is_autocast_available

import torch
from torch import Tensor

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALF_DTYPES)


def half_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Return the 16-bit dtypes of a device; some NPUs lack bfloat16."""
    if device_type == "npu" and not torch.npu.is_bf16_supported():  # type: ignore[attr-defined]
        return (torch.float16,)
    return HALF_DTYPES


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype an operator computes in: float64 for float64, else float32, as on the device."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(tensor: Tensor) -> Tensor:
    """Cast to the accumulation dtype, so that 16-bit results are rounded only once, at the end."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def is_autocast_on(tensor: Tensor) -> bool:
    """Return whether autocast is enabled for a tensor's device type."""
    device_type = tensor.device.type
    return (tensor.is_cpu or is_autocast_available(device_type)) and torch.is_autocast_enabled(device_type)


def without_autocast(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function to run with autocast disabled, which would otherwise cast matrix products to 16 bits.

    The device type is that of the first tensor argument, which may be nested in a tuple.
    """

    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if is_any_autocast_enabled():
            tensor = next(arg for arg in leaves(args) if isinstance(arg, Tensor))
            if is_autocast_on(tensor):
                with torch.autocast(tensor.device.type, enabled=False):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run
