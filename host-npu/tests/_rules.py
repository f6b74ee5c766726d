"""Tables of what CANN's documents take and refuse: calls of phase one with tensors that are made for them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from tests._aclnn import phase_one

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
