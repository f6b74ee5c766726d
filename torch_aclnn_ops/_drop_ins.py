"""Registry of the functions that can replace PyTorch's; ``patch`` reads it."""

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Keyed by the name of the PyTorch function.
DROP_INS: dict[str, Callable[..., Any]] = {}


def drop_in(function: _Function) -> _Function:
    """Register a function as a replacement for the function of the same name in :mod:`torch.nn.functional`."""
    DROP_INS[function.__name__] = function
    return function
