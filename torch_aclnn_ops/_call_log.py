"""Which implementation computes a call: told to the log, to :func:`torch_aclnn_ops.explain` and to reports.

The log is ``torch_aclnn_ops``, at level DEBUG. Texts are made only where there is somebody to read them.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch

_log = logging.getLogger("torch_aclnn_ops")
_explanation: list[tuple[str, str]] | None = None


class Implementation(Enum):
    """What computes a call, and how a sentence about it begins."""

    CANN = ""
    TORCH = "native PyTorch kernel, because "
    FALLBACK = "PyTorch fallback, because "

    def describe(self, detail: str) -> str:
        """Return the sentence: of CANN the operator's name, of the others the reason."""
        return self.value + detail


Listener = Callable[[str, Implementation, str, int], None]
_listeners: list[Listener] = []


def log_call(function: str, implementation: Implementation, detail: Callable[[], str], calls: int = 1) -> None:
    """Record which implementation computes a call; compiled code records nothing, because it is traced only once.

    Args:
        function: the operator or function that is called.
        implementation: what computes it.
        detail: makes the name of CANN's operator, or the reason why another implementation is used.
        calls: how many calls of the operator this is.
    """
    if not is_logging():
        return
    text = detail()
    _record(function, implementation.describe(text))
    if _explanation is None:
        for listener in _listeners:
            listener(function, implementation, text, calls)


def log_detail(function: str, detail: Callable[[], str]) -> None:
    """Record something about a call whose implementation is recorded elsewhere."""
    if is_logging():
        _record(function, detail())


def _record(function: str, text: str) -> None:
    _log.debug("%s: %s", function, text)
    if _explanation is not None and (function, text) not in _explanation:
        _explanation.append((function, text))


def is_logging() -> bool:
    """Return whether implementations are recorded, as they are outside of compiled code."""
    if torch.compiler.is_compiling():
        return False
    return _explanation is not None or bool(_listeners) or _log.isEnabledFor(logging.DEBUG)


def is_explaining() -> bool:
    """Return whether calls run on fake tensors, for :func:`explaining`."""
    return _explanation is not None


@contextmanager
def explaining() -> Iterator[list[tuple[str, str]]]:
    """Collect what is said of the calls inside, each sentence once."""
    global _explanation
    outer, _explanation = _explanation, []
    try:
        yield _explanation
    finally:
        _explanation = outer


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of every call, in all threads."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
