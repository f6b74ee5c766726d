"""Process-wide switches, and the one that disables the package."""

import inspect
import os
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Self = TypeVar("_Self", bound="Switch")

lock = threading.RLock()


class Switch(ContextDecorator):
    """Base class of switches: on in a ``with`` block, in a decorated function, or from ``start()`` to ``stop()``."""

    _starts = 0

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self: _Self) -> _Self:
        """Switch on until :meth:`stop`."""
        with lock:
            self._starts += 1
            self._begin()
        return self

    def stop(self) -> None:
        """Undo :meth:`start`; a no-op without it, as in :mod:`unittest.mock`."""
        with lock:
            if self._starts > 0:
                self._end()
                self._starts -= 1

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function, so that this is on during its calls."""
        ends_later = (inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction)
        if not inspect.isroutine(function) or any(test(function) for test in ends_later):
            raise TypeError(
                f"{type(self).__name__.lower()}: the decorated object must be a function that is neither a generator"
                f" nor a coroutine, but it is {function!r}; use a with statement"
            )
        return super().__call__(function)


def _initial() -> int:
    value = os.environ.get("TORCH_ACLNN_DISABLED", "0")
    if value not in ("0", "1"):
        raise ValueError(f"TORCH_ACLNN_DISABLED must be 0 or 1, but it is {value!r}")
    return int(value)


_times_disabled = _initial()
HOW_TO_ENABLE = (
    "torch_aclnn_ops is disabled; unset TORCH_ACLNN_DISABLED, leave the block of disabled(), or call its stop()"
)


def is_disabled() -> bool:
    """Return whether the package is disabled."""
    return _times_disabled > 0


def why_disabled() -> str | None:
    """Return the reason for reports if the package is disabled, else ``None``."""
    return "torch_aclnn_ops is disabled" if is_disabled() else None


def disabled() -> "Disabled":
    """Make all drop-ins, modules and patched functions call torch's own functions, to find the cause of a problem.

    Like :func:`torch_aclnn_ops.patch`, the result can be used in a ``with`` statement, as a decorator of a function,
    or with ``start()`` and ``stop()``. It applies to the whole process, including other threads. The environment
    variable ``TORCH_ACLNN_DISABLED=1`` disables the package from the start.

    Features that torch lacks stay, with the PyTorch fallback in place of CANN's operators: additional arguments
    (``softcap=`` or ``process_group=`` of ``linear_cross_entropy``) and the steps of
    :class:`torch_aclnn_ops.optim.FusedEmaAdam`. An AdamW of ``patch(adamw=True)`` is such an optimizer. The raw
    operators are unaffected, and so are backward passes of calls that were made before.

    Returns:
        A :class:`Disabled`, which is not yet on.

    Example:
        >>> import torch
        >>> from torch_aclnn_ops import functional as F
        >>> input = torch.ones(2, requires_grad=True)
        >>> with disabled():
        ...     print(F.mse_loss(input, torch.zeros(2)).grad_fn)  # doctest: +ELLIPSIS
        <MseLossBackward0 object at ...>
    """
    return Disabled()


class Disabled(Switch):
    """The switch that :func:`disabled` returns."""

    def __repr__(self) -> str:
        return "disabled()"

    def _begin(self) -> None:
        global _times_disabled
        with lock:
            _times_disabled += 1

    def _end(self) -> None:
        global _times_disabled
        with lock:
            _times_disabled -= 1
