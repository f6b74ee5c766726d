"""Names that replace PyTorch's: the registry of functions that ``patch`` reads, and errors for missing names."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Keyed by the name of the PyTorch function.
DROP_INS: dict[str, Callable[..., Any]] = {}


def drop_in(function: _Function) -> _Function:
    """Register a function as a replacement for the function of the same name in :mod:`torch.nn.functional`."""
    DROP_INS[function.__name__] = function
    return function


def raise_for_missing_names(module: str, of_torch: ModuleType) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``, whose error says where PyTorch has the name."""

    def __getattr__(name: str) -> NoReturn:
        hint = f"; use {of_torch.__name__}.{name}" if name[:1] != "_" and hasattr(of_torch, name) else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return __getattr__
