"""Shared by all drop-in functions: supported arguments, checks, and autocast dtypes."""

from collections.abc import Callable, Collection
from typing import Any

from torch_aclnn_ops._autograd.derivatives import has_tangent
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._checks import check_device, describe
from torch_aclnn_ops._switch import why_disabled
from torch_aclnn_ops._tensors import is_autocast_on
from torch_aclnn_ops._torch_compat.public import Buffer

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

_PLAIN = (Tensor, Parameter, Buffer)


def is_ordinary(*tensors: Any) -> bool:
    """Return whether all arguments are strided floating-point tensors that do not override ``__torch_function__``.

    Anything else (integer, complex and sparse tensors, subclasses with custom behavior, other objects) is passed to
    PyTorch's function of the same name, which returns a result or raises.
    """
    for tensor in tensors:
        if type(tensor) not in _PLAIN and (not isinstance(tensor, Tensor) or overrides_torch(tensor)):
            return False
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return False
    return True


def overrides_torch(tensor: Tensor) -> bool:
    """Return whether the tensor's class overrides torch functions, as DTensor does."""
    cls = type(tensor)
    if cls in _PLAIN:
        return False
    # Parameter overrides nothing. Wrapper subclasses such as DTensor are flattened while tracing.
    return cls.__torch_function__ is not Parameter.__torch_function__ or hasattr(cls, "__tensor_flatten__")


def check_tensors(function: str, optional: Collection[str] = (), **arguments: object) -> None:
    """Raise ``TypeError`` unless arguments are tensors, have ``__torch_function__``, or are optional and ``None``."""
    for name, value in arguments.items():
        # In this order, because compilers do not know whether None has the attribute.
        if isinstance(value, Tensor) or (value is None and name in optional):
            continue
        if not hasattr(type(value), "__torch_function__"):
            accepted = "None or a Tensor" if name in optional else "a Tensor"
            raise TypeError(f"{function}: {name} must be {accepted}, but it is {describe(value)}")


def call_torch_function(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call PyTorch's original function, which :func:`torch_aclnn_ops.patch` may have replaced.

    Handles ``__torch_function__`` here, so that overrides receive the original function.
    """
    if not torch.compiler.is_compiling():
        log_call(function.__name__, Implementation.TORCH, why_left_to_torch)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if has_torch_function(tensors):
            result: Tensor = handle_torch_function(function, tensors, *args, **kwargs)
            return result
    return function(*args, **kwargs)


def why_left_to_torch() -> str:
    """Return why a drop-in calls PyTorch's function."""
    return why_disabled() or "the drop-in leaves such arguments to torch"


def on_one_device(function: str, **tensors: Tensor | None) -> bool:
    """Return whether all tensors are on the same device; raise if they are on two devices of the same type.

    NPU kernels do not check this. Mixed device types are passed to PyTorch, which accepts 0-dim CPU tensors.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    device = next(iter(given.values())).device
    if all(tensor.device == device for tensor in given.values()):
        return True
    of_type = {name: tensor for name, tensor in given.items() if tensor.device.type == device.type}
    check_device(function, list(of_type), list(of_type.values()))
    return False


def check_no_tangent(function: str, weight: Tensor | None) -> None:
    """Raise if the weight has a forward-mode tangent; PyTorch's own losses silently return zeros."""
    if has_tangent(weight):
        raise RuntimeError(
            f"{function}: weight must not have a tangent, because there is no derivative with respect to it;"
            " detach it, or multiply the unreduced loss by it"
        )


def float32_autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a loss under autocast: float32 for a 16-bit tensor if autocast is enabled."""
    if tensor.dtype in (torch.float16, torch.bfloat16) and is_autocast_on(tensor):
        return torch.float32
    return tensor.dtype


def lower_precision_autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product under autocast: its lower-precision dtype, except for float64."""
    if tensor.dtype != torch.float64 and is_autocast_on(tensor):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype
