"""Which functions of this package can take the place of torch's: they declare it, and ``patch`` reads it."""

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# By their names, which are those of torch's functions.
DROP_INS: dict[str, Callable[..., Any]] = {}


def drop_in(function: _Function) -> _Function:
    """Declare that a function can take the place of that of the same name in :mod:`torch.nn.functional`."""
    DROP_INS[function.__name__] = function
    return function
