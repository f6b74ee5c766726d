"""Records which implementation computes a call: for the log, :func:`torch_aclnn_ops.explain` and reports.

The logger is ``torch_aclnn_ops``, at level DEBUG. Messages are formatted only if they are recorded.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch

_log = logging.getLogger("torch_aclnn_ops")
_explanation: list[tuple[str, str]] | None = None
_explaining_thread = 0


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
    if not is_explaining():
        for listener in _listeners:
            listener(function, implementation, text, calls)


def log_detail(function: str, detail: Callable[[], str]) -> None:
    """Record a detail of a call whose implementation is recorded elsewhere."""
    if is_logging():
        _record(function, detail())


def _record(function: str, text: str) -> None:
    _log.debug("%s: %s", function, text)
    explanation = _explanation
    if is_explaining() and explanation is not None and (function, text) not in explanation:
        explanation.append((function, text))


def is_logging() -> bool:
    """Return whether calls are recorded; always False in compiled code."""
    if torch.compiler.is_compiling():
        return False
    return is_explaining() or bool(_listeners) or _log.isEnabledFor(logging.DEBUG)


def is_explaining() -> bool:
    """Return whether this thread runs on fake tensors for :func:`explaining`; others may make real calls meanwhile.

    It is the thread that explains, or one of autograd, which takes over its modes.
    """
    if _explanation is None:
        return False
    return threading.get_ident() == _explaining_thread or type(torch.empty(0)) is not torch.Tensor


@contextmanager
def explaining() -> Iterator[list[tuple[str, str]]]:
    """Collect the messages about the calls inside, without duplicates."""
    global _explanation, _explaining_thread
    outer, _explaining_thread, _explanation = (_explanation, _explaining_thread), threading.get_ident(), []
    try:
        yield _explanation
    finally:
        _explanation, _explaining_thread = outer


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener for every call, in all threads."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
