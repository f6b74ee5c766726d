"""Records which implementation computes a call: for the log, :func:`torch_aclnn_ops.explain` and reports.

The logger is ``torch_aclnn_ops``, at level DEBUG. Messages are formatted only if they are recorded.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch

_log = logging.getLogger("torch_aclnn_ops")


class Implementation(Enum):
    """The implementation of a call; the value is the prefix of its description."""

    CANN = ""
    TORCH = "native PyTorch kernel, because "
    FALLBACK = "PyTorch fallback, because "

    def describe(self, detail: str) -> str:
        """Return the description; ``detail`` is the operator's name for CANN, and the reason otherwise."""
        return self.value + detail


Listener = Callable[[str, Implementation, str, int], None]
_listeners: list[Listener] = []
_collections: list[list[str]] = []


def log_call(function: str, implementation: Implementation, detail: Callable[[], str], calls: int = 1) -> None:
    """Record which implementation computes a call; a no-op in compiled code, which is traced only once.

    Args:
        function: the operator or function that is called.
        implementation: the implementation.
        detail: returns the name of CANN's operator, or the reason for another implementation.
        calls: the number of calls.
    """
    if not is_logging():
        return
    text = detail()
    _record(function, implementation.describe(text))
    for listener in _listeners:
        listener(function, implementation, text, calls)


def log_detail(function: str, detail: Callable[[], str]) -> None:
    """Record a detail of a call whose implementation is recorded elsewhere."""
    if is_logging():
        _record(function, detail())


def _record(function: str, text: str) -> None:
    _log.debug("%s: %s", function, text)
    for lines in _collections:
        lines.append(f"{function}: {text}")


def is_logging() -> bool:
    """Return whether calls are recorded; always False in compiled code."""
    return not torch.compiler.is_compiling() and is_logging_in_eager_mode()


def is_logging_in_eager_mode() -> bool:
    """Return whether calls are recorded, for callers that know that no code is being compiled."""
    return bool(_listeners) or bool(_collections) or _log.isEnabledFor(logging.DEBUG)


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Collect the messages about all calls, in all threads."""
    lines: list[str] = []
    _collections.append(lines)
    try:
        yield lines
    finally:
        # By identity: another collection may have equal lines.
        _collections[:] = [each for each in _collections if each is not lines]


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener for every call, in all threads."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
