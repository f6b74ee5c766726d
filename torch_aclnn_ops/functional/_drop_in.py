"""What every drop-in function decides before it computes: is the call ours, and what does autocast ask for."""

from collections.abc import Callable, Collection
from typing import Any

from torch_aclnn_ops._autograd.derivatives import has_tangent
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._numerics import is_autocast_on
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._torch_compat.public import Buffer

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

_PLAIN = (Tensor, Parameter, Buffer)


def is_ordinary(*tensors: Any) -> bool:
    """Return whether all arguments are strided floating-point tensors without a ``__torch_function__`` of their own.

    Anything else (integers, complex numbers, sparse layouts, subclasses with a behaviour of their own, no tensors at
    all) is left to torch's function of the same name, for its result or its error.
    """
    for tensor in tensors:
        if type(tensor) not in _PLAIN and (not isinstance(tensor, Tensor) or overrides_torch(tensor)):
            return False
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return False
    return True


def overrides_torch(tensor: Tensor) -> bool:
    """Return whether the tensor's class changes what torch functions do with it, as DTensor does."""
    cls = type(tensor)
    if cls in _PLAIN:
        return False
    # Parameter changes nothing; DTensor and others with these methods are traced as the tensors that they wrap.
    return cls.__torch_function__ is not Parameter.__torch_function__ or hasattr(cls, "__tensor_flatten__")


def check_tensors(function: str, optional: Collection[str] = (), **arguments: object) -> None:
    """Raise for arguments that are no tensors, before torch would fail inside; ``optional`` ones may be ``None``.

    Objects with a ``__torch_function__`` are left to torch.
    """
    for name, value in arguments.items():
        if isinstance(value, Tensor) or hasattr(type(value), "__torch_function__"):
            continue
        if value is not None or name not in optional:
            accepted = "None or a Tensor" if name in optional else "a Tensor"
            raise TypeError(f"{function}: {name} must be {accepted}, but it is {describe(value)}")


def check_reduction(function: str, reduction: object) -> None:
    """Raise for an array, which torch cannot compare with a name; torch has errors for everything else."""
    if hasattr(reduction, "__array__"):
        raise TypeError(f'{function}: reduction must be "none", "mean" or "sum", but it is {describe(reduction)}')


def call_torch_function(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call torch's function of the same name, held from before :func:`torch_aclnn_ops.patch` may have replaced it.

    Torch would tell a class that overrides it what stands under its name, so this does it.
    """
    if not torch.compiler.is_compiling():
        log_call(function.__name__, Implementation.TORCH, _why_left_to_torch)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if has_torch_function(tensors):
            result: Tensor = handle_torch_function(function, tensors, *args, **kwargs)
            return result
    return function(*args, **kwargs)


def _why_left_to_torch() -> str:
    return "torch_aclnn_ops is disabled" if is_disabled() else "the drop-in leaves such arguments to torch"


def on_one_device(function: str, **tensors: Tensor | None) -> bool:
    """Return whether all tensors are on one device, and raise where they are on two of a kind.

    Torch decides about the others: it takes a number from the CPU for every device. Kernels of an NPU do not look where
    their other arguments are.
    """
    device = first = None
    is_one = True
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            if tensor.device.type == device.type:
                raise RuntimeError(
                    f"{function}: {name} must be on {device}, as {first} is, but it is on {tensor.device}"
                )
            is_one = False
    return is_one


def check_no_tangent(function: str, weight: Tensor | None) -> None:
    """Raise where forward-mode AD would differentiate by a weight; torch's own losses return zeros for it."""
    if has_tangent(weight):
        raise RuntimeError(
            f"{function}: weight must not have a tangent, because there is no derivative with respect to it;"
            " detach it, or multiply the unreduced loss by it"
        )


def float32_autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast runs a loss on this tensor: float32 for 16 bits where it is on."""
    if tensor.dtype in (torch.float16, torch.bfloat16) and is_autocast_on(tensor):
        return torch.float32
    return tensor.dtype


def lower_precision_autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast runs a matrix product on this tensor; float64 stays."""
    if tensor.dtype != torch.float64 and is_autocast_on(tensor):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype
