"""Shared arguments of losses on a linear layer's output: numbers, token weights, and shifted labels."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from torch_aclnn_ops._checks import describe

import torch
from torch import Tensor

_REAL = (float, Real)  # float first, for speed
_Rule = tuple[Any, str, str, Callable[[Any], bool]]
_COUNT = ("at least 1", lambda number: number >= 1)
_POSITIVE = ("positive and finite", lambda number: 0 < number < math.inf)
POSITIVE: _Rule = (_REAL, "a number", *_POSITIVE)
NON_NEGATIVE: _Rule = (_REAL, "a number", "at least 0 and finite", lambda number: 0 <= number < math.inf)
FRACTION: _Rule = (_REAL, "a number", "above 0 and below 1", lambda number: 0 < number < 1)
_RULES: dict[str, _Rule] = {
    "chunk_size": (Integral, '"auto" or an int', *_COUNT),
    "max_memory": (Integral, "None or an int", *_COUNT),
    "softcap": (_REAL, "None or a number", *_POSITIVE),
    "temperature": POSITIVE,
    "lse_square_scale": NON_NEGATIVE,
}


def check_number(function: str, name: str, value: Any, rule: _Rule | None = None) -> Any:
    """Check the type and range of a number, possibly a NumPy scalar, and return it as a Python number."""
    kind, accepted, accepted_range, fits = rule or _RULES[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{function}: {name} must be {accepted}, but it is {value!r}")
    if not fits(value):
        raise ValueError(f"{function}: {name} must be {accepted_range}, but it is {value}")
    return int(value) if kind is Integral else float(value)


def check_memory(
    function: str, chunk_size: int | str, max_memory: int | None, default: int | None = None
) -> tuple[int | None, int | None]:
    """Check chunk_size and max_memory, at most one of which may be given; ``default`` replaces ``"auto"``."""
    rows = default if chunk_size == "auto" else check_number(function, "chunk_size", chunk_size)
    if max_memory is not None:
        if rows is not None:
            raise ValueError(
                f"{function}: chunk_size and max_memory must not both be given, but they are {rows} and {max_memory}"
            )
        max_memory = check_number(function, "max_memory", max_memory)
    return rows, max_memory


def check_token_weight(function: str, token_weight: object, target_shape: tuple[int, ...], input: Tensor) -> None:
    """Check that token_weight is a floating-point tensor of the target's shape."""
    if not isinstance(token_weight, Tensor):
        raise TypeError(f"{function}: token_weight must be a Tensor or None, but it is {token_weight!r}")
    if not token_weight.is_floating_point():
        raise TypeError(f"{function}: token_weight must have a floating-point dtype, but it has {token_weight.dtype}")
    if token_weight.shape != target_shape:
        raise ValueError(
            f"{function}: token_weight must have the shape of class indices, {list(target_shape)}, but its"
            f" shape is {list(token_weight.shape)}"
        )
    if token_weight.device != input.device:
        raise RuntimeError(
            f"{function}: token_weight must be on {input.device}, as input is, but it is on {token_weight.device}"
        )


def check_shift(function: str, shift: object, target: Tensor | None) -> int:
    """Check that shift is less than the sequence length, and return it as an int."""
    if not isinstance(shift, (bool, Integral)):
        raise TypeError(f"{function}: shift must be a bool or an int, but it is {shift!r}")
    places = int(shift)
    if target is None:
        return places
    length = target.shape[-1] if target.dim() > 0 else 1
    if places != 0 and not 0 <= places < length:
        raise ValueError(
            f"{function}: shift must be at least 0 and less than the {length} labels of a sequence, the last"
            f" dimension of target, but it is {shift}"
        )
    return places


def labels_to_rows(
    target: Tensor, token_weight: Tensor | None, places: int, ignored: int
) -> tuple[Tensor, Tensor | None]:
    """Shift labels and their weights to the rows that predict them.

    The last rows of a sequence have no label and are ignored, so the input is not copied.
    """
    target = torch.nn.functional.pad(target[..., places:].long(), (0, places), value=ignored)
    if isinstance(token_weight, Tensor):
        token_weight = token_weight.roll(-places, -1)
    return target, token_weight


def rows_to_labels(result: Tensor, places: int) -> Tensor:
    """Shift the results of rows to their labels; those of ignored rows come first."""
    return result.roll(places, -1) if result.dim() > 0 else result


def check_one_shape(function: str, **tensors: Any) -> None:
    """Check that tensors have the same shape, because broadcasting would give a wrong result."""
    name, first = next(iter(tensors.items()))
    for other, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {other} must be a Tensor, but it is {describe(tensor)}")
        if tensor.shape != first.shape:
            raise ValueError(
                f"{function}: {other} must have shape {list(first.shape)}, as {name} has, but its shape is"
                f" {list(tensor.shape)}"
            )
