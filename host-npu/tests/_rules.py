"""Tables of what CANN's documents take and refuse: calls of phase one with tensors that are made for them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from tests._aclnn import DTYPES, phase_one

_INVALID = 161002


class T(NamedTuple):
    """A tensor to make on the device."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float16

    def make(self) -> torch.Tensor:
        """Return it, with zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device="npu")


def t(*shape: int, dtype: torch.dtype = torch.float16) -> T:
    """Describe a tensor."""
    return T(shape, dtype)


def made(value: object) -> object:
    """Return an argument with its tensors."""
    if isinstance(value, list):
        return [made(each) for each in value]
    return value.make() if isinstance(value, T) else value


@dataclass(frozen=True)
class Function:
    """A function of CANN."""

    name: str
    # A call that is taken.
    arguments: tuple[object, ...]
    # Another argument at a position, and what is said of it.
    refused: tuple[tuple[int, object, str], ...] = field(default=())
    # The dimensions of arguments that may have another size, as pairs of positions.
    free: tuple[tuple[int, int], ...] = field(default=())
    # The positions of arguments that may have another dtype than in the call, beside the same others.
    mixed: tuple[int, ...] = field(default=())


def each(functions: list[Function]) -> pytest.MarkDecorator:
    """Give a test every function."""
    return pytest.mark.parametrize("function", functions, ids=lambda function: function.name)


def each_refusal(functions: list[Function]) -> pytest.MarkDecorator:
    """Give a test every argument that a function refuses."""
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
    """Return a dimension and the argument with another size of it, for one more, one less, and 1."""
    if isinstance(value, list):
        for member, each in enumerate(value):
            for dim, other in _resized(each):
                yield dim, [*value[:member], other, *value[member + 1 :]]
    elif isinstance(value, T):
        for dim, size in enumerate(value.shape):
            for other in {size + 1, max(size - 1, 0), 1} - {size}:
                yield dim, T((*value.shape[:dim], other, *value.shape[dim + 1 :]), value.dtype)


def _cast(value: object) -> Iterator[object]:
    """Return the argument with each other dtype."""
    if isinstance(value, list):
        yield from ([other, *value[1:]] for each in value[:1] for other in _cast(each))
    elif isinstance(value, T):
        yield from (T(value.shape, dtype) for dtype in DTYPES if dtype != value.dtype)


def assert_dtypes_fit(function: Function) -> None:
    """Make the documented call with another dtype of each argument: all but the mixed ones have theirs alone."""
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
    """Make the documented call with another size of each dimension of each argument: all but the free ones count."""
    taken = set()
    for position, value in enumerate(function.arguments):
        for dim, other in _resized(value):
            arguments = [*function.arguments]
            arguments[position] = other
            status, _, _ = phase_one(function.name, *map(made, arguments))
            if status == 0:
                taken.add((position, dim))
    assert sorted(taken) == sorted(function.free)
