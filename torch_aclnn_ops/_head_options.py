"""Checks of the options of losses on a head: numbers, chunks of rows, and the shift of labels."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, get_args

from torch_aclnn_ops._checks import Reduction, check_bool, check_choice, values_are_readable

from torch import Tensor

_REAL = (float, Real)  # float first, for speed
_Rule = tuple[Any, str, str, Callable[[Any], bool]]
_COUNT = ("at least 1", lambda number: number >= 1)
_POSITIVE = ("positive and finite", lambda number: 0 < number < math.inf)
AT_LEAST_1: _Rule = (Integral, "an int", *_COUNT)
FINITE: _Rule = (_REAL, "a number", "finite", lambda number: -math.inf < number < math.inf)
POSITIVE: _Rule = (_REAL, "a number", *_POSITIVE)
OPTIONAL_POSITIVE: _Rule = (_REAL, "None or a number", *_POSITIVE)
NON_NEGATIVE: _Rule = (_REAL, "a number", "at least 0 and finite", lambda number: 0 <= number < math.inf)
_FRACTION: _Rule = (_REAL, "a number", "at least 0 and at most 1", lambda number: 0 <= number <= 1)
_RULES: dict[str, _Rule] = {
    "chunk_size": (Integral, '"auto" or an int', *_COUNT),
    "max_memory": (Integral, "None or an int", *_COUNT),
    "temperature": POSITIVE,
}


def check_number(function: str, name: str, value: Any, rule: _Rule | None = None) -> Any:
    """Check the type and range of a number, possibly a NumPy scalar, and return it as a Python number."""
    kind, accepted, accepted_range, fits = rule or _RULES[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{function}: {name} must be {accepted}, but it is {found}")
    if not fits(value):
        raise ValueError(f"{function}: {name} must be {accepted_range}, but it is {value}")
    return int(value) if kind is Integral else float(value)


def check_scalar(function: str, name: str, value: Any, rule: _Rule) -> None:
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
    """Check the weight of the Jensen-Shannon divergence, and return it as a float; the others do not use it."""
    value: float = check_number(function, "beta", beta, _FRACTION)
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
    length = target.shape[-1] if target.dim() > 0 else 0
    if places != 0 and not 0 <= places <= length:
        raise ValueError(
            f"{function}: shift must be at least 0 and at most the {length} labels of a sequence, the last"
            f" dimension of target, but it is {shift}"
        )
    return places


def check_options(
    module: str,
    reduction: str,
    temperature: float,
    shift: bool | int,
    zero_if_all_ignored: bool,
    chunk_size: int | str,
    max_memory: int | None,
) -> None:
    """Check the options that modules share in their constructors. Each call checks them again."""
    check_choice(module, "reduction", reduction, get_args(Reduction))
    check_number(module, "temperature", temperature)
    if check_shift(module, shift, None) < 0:
        raise ValueError(f"{module}: shift must be at least 0, but it is {shift}")
    check_bool(module, "zero_if_all_ignored", zero_if_all_ignored)
    check_memory(module, chunk_size, max_memory)
