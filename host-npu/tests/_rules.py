"""Tables of documented valid and refused arguments: calls of phase one with tensors created for them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from tests._aclnn import DTYPES, phase_one

_INVALID = 161002


class T(NamedTuple):
    """The description of a tensor on the device."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float16

    def make(self) -> torch.Tensor:
        """Return the tensor, filled with zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device="npu")


def t(*shape: int, dtype: torch.dtype = torch.float16) -> T:
    """Describe a tensor."""
    return T(shape, dtype)


def made(value: object) -> object:
    """Return an argument with created tensors."""
    if isinstance(value, list):
        return [made(each) for each in value]
    return value.make() if isinstance(value, T) else value


@dataclass(frozen=True)
class Function:
    """A function of CANN."""

    name: str
    # A valid call.
    arguments: tuple[object, ...]
    # Triples of a position, a refused argument, and its message.
    refused: tuple[tuple[int, object, str], ...] = field(default=())
    # Dimensions of arguments that may have another size, as pairs of positions.
    free: tuple[tuple[int, int], ...] = field(default=())
    # The positions of arguments that may have another dtype while the others are unchanged.
    mixed: tuple[int, ...] = field(default=())


def each(functions: list[Function]) -> pytest.MarkDecorator:
    """Parametrize a test over the functions."""
    return pytest.mark.parametrize("function", functions, ids=lambda function: function.name)


def each_refusal(functions: list[Function]) -> pytest.MarkDecorator:
    """Parametrize a test over the arguments that functions refuse."""
    return pytest.mark.parametrize(
        ("function", "position", "argument", "sentence"),
        [
            pytest.param(function, *refused, id=f"{function.name}-{refused[2]}")
            for function in functions
            for refused in function.refused
        ],
    )


def assert_taken(function: Function) -> None:
    """Make the documented call."""
    status, message, _ = phase_one(function.name, *map(made, function.arguments))
    assert status == 0, message


def assert_refused(function: Function, position: int, argument: object, sentence: str) -> None:
    """Make the documented call with another argument."""
    arguments = [*function.arguments]
    arguments[position] = argument
    status, message, _ = phase_one(function.name, *map(made, arguments))
    assert status == _INVALID
    assert sentence in message


def _resized(value: object) -> Iterator[tuple[int, object]]:
    """Yield each dimension and the argument with another size of it: one more, one less, and 1."""
    if isinstance(value, list):
        for member, each in enumerate(value):
            for dim, other in _resized(each):
                yield dim, [*value[:member], other, *value[member + 1 :]]
    elif isinstance(value, T):
        for dim, size in enumerate(value.shape):
            for other in {size + 1, max(size - 1, 0), 1} - {size}:
                yield dim, T((*value.shape[:dim], other, *value.shape[dim + 1 :]), value.dtype)


def _cast(value: object) -> Iterator[object]:
    """Yield the argument with each other dtype."""
    if isinstance(value, list):
        yield from ([other, *value[1:]] for each in value[:1] for other in _cast(each))
    elif isinstance(value, T):
        yield from (T(value.shape, dtype) for dtype in DTYPES if dtype != value.dtype)


def assert_dtypes_fit(function: Function) -> None:
    """Change the dtype of each argument of the documented call: only the mixed ones may have another."""
    taken = set()
    for position, value in enumerate(function.arguments):
        others = [*_cast(value)]
        statuses = [
            phase_one(
                function.name, *map(made, (*function.arguments[:position], other, *function.arguments[position + 1 :]))
            )[0]
            for other in others
        ]
        if 0 in statuses:
            taken.add(position)
            assert any(statuses)
    assert sorted(taken) == sorted(function.mixed)


def assert_sizes_fit(function: Function) -> None:
    """Change the size of each dimension of the documented call's arguments: only the free ones may have another."""
    taken = set()
    for position, value in enumerate(function.arguments):
        for dim, other in _resized(value):
            arguments = [*function.arguments]
            arguments[position] = other
            status, _, _ = phase_one(function.name, *map(made, arguments))
            if status == 0:
                taken.add((position, dim))
    assert sorted(taken) == sorted(function.free)
