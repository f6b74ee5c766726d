"""The registry of drop-ins, and checks of arguments that several functions share, also for CANN's operators.

Each error names the function, the argument, its value and what is accepted.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import ModuleType
from typing import Any, Literal, NoReturn, TypeVar, get_args

from torch_aclnn_ops import _extension
from torch_aclnn_ops._tensors import first_overlap, overlaps_itself
from torch_aclnn_ops._torch_compat.private import is_functorch_wrapped_tensor
from torch_aclnn_ops._torch_compat.public import Buffer, get_proxy_mode, in_jit_trace

import torch
from torch import Tensor
from torch.nn import Parameter

Reduction = Literal["none", "mean", "sum"]
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Keyed by the name of the PyTorch function.
DROP_INS: dict[str, Callable[..., Any]] = {}


def drop_in(function: _Function) -> _Function:
    """Register a function as a replacement for the function of the same name in :mod:`torch.nn.functional`."""
    DROP_INS[function.__name__] = function
    return function


def describe(value: object) -> str:
    """Describe an argument of the wrong type for an error message."""
    return repr(value) if isinstance(value, (int, float, str, type(None))) else f"of type {type(value).__name__}"


def check_choice(function: str, name: str, value: object, accepted: Sequence[str]) -> None:
    """Check that ``value`` is one of the accepted strings."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{function}: {name} must be one of {', '.join(map(repr, accepted))}, but it is {value!r}")


def check_bool(function: str, name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a bool, but it is {value!r}")


def check_device(operator: str, names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Raise unless all tensors are on the device of the first argument."""
    device = arguments[0].device
    for i, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.device != device:
            raise RuntimeError(
                f"{operator}: {names[i]} must be on {device}, as {names[0]} is, but it is on {value.device}"
            )


def check_reduction(operator: str, reduction: int) -> None:
    """Raise unless ``reduction`` is 0, 1 or 2, the values of ``at::Reduction``."""
    if reduction not in (0, 1, 2):
        raise ValueError(f"{operator}: reduction must be 0 (none), 1 (mean) or 2 (sum), but it is {reduction}")


def check_floating_point(operator: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor is real floating point or ``None``."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{operator}: {name} must have a floating-point dtype, but it has {tensor.dtype}")


def check_dtype(operator: str, dtypes: Sequence[torch.dtype], reason: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor's dtype is in ``dtypes``; ``reason`` completes the message, e.g. ``"as self has"``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in dtypes:
            accepted = " or ".join(str(dtype) for dtype in dtypes)
            clause = f" {reason}" if reason else ""
            raise TypeError(f"{operator}: {name} must have dtype {accepted}{clause}, but it has {tensor.dtype}")


def check_rank(operator: str, rank: int, **tensors: Tensor | None) -> None:
    """Raise unless each tensor has ``rank`` dimensions."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() != rank:
            raise ValueError(f"{operator}: {name} must have {rank} dimensions, but its shape is {list(tensor.shape)}")


def check_shape(operator: str, shape: Sequence[int], meaning: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor has ``shape``; ``meaning`` names its dimensions in the message, e.g. ``"[BT]"``."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{operator}: {name} must have shape {meaning} = {list(shape)}, but its shape is {list(tensor.shape)}"
            )


def is_expandable(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor expands to ``shape``."""
    offset = len(shape) - tensor.dim()
    return offset >= 0 and all(size in (1, shape[offset + i]) for i, size in enumerate(tensor.shape))


def check_expandable(operator: str, shape: Sequence[int], meaning: str, **tensors: Tensor | None) -> None:
    """Raise unless each tensor expands to ``shape``."""
    for name, tensor in tensors.items():
        if tensor is not None and not is_expandable(tensor, shape):
            raise ValueError(
                f"{operator}: {name} must broadcast to {meaning} {list(shape)}, but its shape is {list(tensor.shape)}"
            )


def broadcast_shape(operator: str, **tensors: Tensor) -> torch.Size:
    """Return the broadcast shape of the tensors; raise ``ValueError`` if they do not broadcast."""
    shapes = [tensor.shape for tensor in tensors.values() if tensor.dim()]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0] if shapes else torch.Size()
    try:
        shape: torch.Size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
        return shape
    except RuntimeError:
        given = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{operator}: the shapes must broadcast together, but they are {given}") from None


def check_in_place(operator: str, written: Mapping[str, Tensor], **read: Tensor) -> None:
    """Raise if tensors that are written in place overlap internally, with each other, or with tensors that are read."""
    if _is_tracing() or not all(map(_is_real, written.values())):
        return
    for name, tensor in written.items():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{operator}: {name} must not be an inference tensor outside of torch.inference_mode, because it is"
                " written to"
            )
        if overlaps_itself(tensor):
            raise RuntimeError(
                f"{operator}: {name} must not have internal overlap, because it is written to, but it has"
                f" shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            )
    real = {**written, **{name: one for name, one in read.items() if _is_real(one)}}
    tensors = {name: one for name, one in real.items() if one.numel() > 0}
    shared = first_overlap(list(tensors.values()), len(tensors.keys() & written.keys()))
    if shared is not None:
        name, other = (list(tensors)[i] for i in shared)
        raise RuntimeError(f"{operator}: {name} and {other} must not share memory, because {name} is written to")


def _is_tracing() -> bool:
    return torch.compiler.is_compiling() or in_jit_trace() or get_proxy_mode() is not None


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has its own memory, unlike tensors that are fake or wrapped by a transform."""
    is_usual = type(tensor) in (Tensor, Parameter, Buffer)
    return is_usual and not tensor.is_meta and not is_functorch_wrapped_tensor(tensor)


def values_are_readable(tensor: Tensor) -> bool:
    """Return whether a check may read values: on an NPU only if checks are enabled, and never while tracing."""
    return (tensor.is_cpu or _extension.checks_values()) and not _is_tracing() and _is_real(tensor)


# What CANN's operators support.
_MAX_RANK = 8
_EVERYWHERE = (torch.float32, torch.float16)
_WITHOUT_BFLOAT16 = ("Ascend910", "Ascend310P")


def why_not_rank(names: Sequence[str], arguments: Iterable[object]) -> str | None:
    """Return why CANN does not support the number of dimensions of these tensors, or ``None``."""
    for i, tensor in enumerate(arguments):
        if isinstance(tensor, Tensor) and tensor.dim() > _MAX_RANK:
            return f"{names[i]} has {tensor.dim()} dimensions and CANN's operators support at most {_MAX_RANK}"
    return None


def why_not_dtype(soc: str, names: Sequence[str], *tensors: Tensor | None) -> str | None:
    """Return why an operator for float32, float16 and bfloat16 does not support these dtypes, or ``None``."""
    for i, tensor in enumerate(tensors):
        if tensor is None or tensor.dtype in _EVERYWHERE:
            continue
        if tensor.dtype != torch.bfloat16 or soc in _WITHOUT_BFLOAT16:
            return f"{names[i]} is {tensor.dtype}, which CANN's operator does not support on {soc}"
    return None


def why_not_chip(soc: str, chips: Collection[str]) -> str | None:
    """Return why an operator of these chip families does not run on a chip, or ``None``."""
    return None if soc in chips else f"CANN's operator is not supported on {soc}"


def raise_for_missing_names(module: str, of_torch: ModuleType) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``, whose error says where PyTorch has the name."""

    def __getattr__(name: str) -> NoReturn:
        hint = f"; use {of_torch.__name__}.{name}" if name[:1] != "_" and hasattr(of_torch, name) else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return __getattr__


_REAL = (float, Real)  # float first, for speed
Rule = tuple[Any, str, str, Callable[[Any], bool]]
_COUNT = ("at least 1", lambda number: number >= 1)
_POSITIVE = ("positive and finite", lambda number: 0 < number < math.inf)
AT_LEAST_1: Rule = (Integral, "an int", *_COUNT)
FINITE: Rule = (_REAL, "a number", "finite", lambda number: -math.inf < number < math.inf)
POSITIVE: Rule = (_REAL, "a number", *_POSITIVE)
OPTIONAL_POSITIVE: Rule = (_REAL, "None or a number", *_POSITIVE)
NON_NEGATIVE: Rule = (_REAL, "a number", "at least 0 and finite", lambda number: 0 <= number < math.inf)
FRACTION: Rule = (_REAL, "a number", "at least 0 and at most 1", lambda number: 0 <= number <= 1)
_RULES: dict[str, Rule] = {
    "chunk_size": (Integral, '"auto" or an int', *_COUNT),
    "max_memory": (Integral, "None or an int", *_COUNT),
    "temperature": POSITIVE,
}


def check_number(function: str, name: str, value: Any, rule: Rule | None = None) -> Any:
    """Check the type and range of a number, possibly a NumPy scalar, and return it as a Python number."""
    kind, accepted, accepted_range, fits = rule or _RULES[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{function}: {name} must be {accepted}, but it is {found}")
    if not fits(value):
        raise ValueError(f"{function}: {name} must be {accepted_range}, but it is {value}")
    return int(value) if kind is Integral else float(value)


def given_arguments(local_names: dict[str, Any], *others: str) -> dict[str, Any]:
    """Return the arguments of a constructor, from its ``locals()``, without ``self`` and ``others``."""
    # A copy, because in Python 3.12 a debugger adds to the original while it is iterated over.
    return {name: value for name, value in dict(local_names).items() if name not in ("self", "__class__", *others)}


def check_scalar(function: str, name: str, value: Any, rule: Rule) -> None:
    """Check a number, or a tensor of one element, whose value is checked where it can be read."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{function}: {name} must be a number or have one element, but its shape is {list(value.shape)}"
            )
        if not values_are_readable(value):
            return
        value = value.item()
    check_number(function, name, value, rule)


def check_beta(function: str, divergence: str, beta: Any) -> float:
    """Check the weight of the Jensen-Shannon divergence, and return it as a float; other divergences do not use it."""
    value: float = check_number(function, "beta", beta, FRACTION)
    if divergence != "jensen_shannon" and value != 0.5:
        accepted = f"0.5, the default, with divergence={divergence!r}"
        raise ValueError(f"{function}: beta must be {accepted}, but it is {value}")
    return value


def check_memory(
    function: str, chunk_size: int | str, max_memory: int | None, default: int | None = None
) -> tuple[int | None, int | None]:
    """Check chunk_size and max_memory, at most one of which may be given; ``default`` replaces ``"auto"``."""
    is_auto = isinstance(chunk_size, str) and chunk_size == "auto"  # an array would compare its elements
    rows = default if is_auto else check_number(function, "chunk_size", chunk_size)
    if max_memory is not None:
        if rows is not None:
            raise ValueError(
                f"{function}: chunk_size and max_memory must not both be given, but they are {rows} and {max_memory}"
            )
        max_memory = check_number(function, "max_memory", max_memory)
    return rows, max_memory


def check_shift(function: str, shift: object, target: Tensor | None) -> int:
    """Check that shift is at most the sequence length, with which no row has a label, and return it as an int."""
    if not isinstance(shift, (bool, Integral)):
        raise TypeError(f"{function}: shift must be a bool or an int, but it is {shift!r}")
    places = int(shift)
    if target is None:
        return places
    if places > 0 and target.numel() == 0:
        return 0  # of sequences without labels none is shifted
    length = target.shape[-1] if target.dim() > 0 else 0
    if places != 0 and not 0 <= places <= length:
        raise ValueError(
            f"{function}: shift must be at least 0 and at most the {length} labels of a sequence, the last"
            f" dimension of target, but it is {shift}"
        )
    return places


def check_options(module: str, given: Mapping[str, Any]) -> None:
    """Check the options that modules share in their constructors. Each call checks them again."""
    check_choice(module, "reduction", given["reduction"], get_args(Reduction))
    check_number(module, "temperature", given["temperature"])
    if check_shift(module, given["shift"], None) < 0:
        raise ValueError(f"{module}: shift must be at least 0, but it is {given['shift']}")
    check_bool(module, "zero_if_all_ignored", given["zero_if_all_ignored"])
    check_memory(module, given["chunk_size"], given["max_memory"])
