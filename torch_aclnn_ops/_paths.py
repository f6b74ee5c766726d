"""Tell which path a call takes: to the log ``torch_aclnn_ops`` at level DEBUG, and to :func:`torch_aclnn_ops.explain`.

Texts are made only where somebody listens.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_log = logging.getLogger("torch_aclnn_ops")
_recorder: list[tuple[str, str]] | None = None


def log_path(function: str, describe: Callable[[], str]) -> None:
    """Tell the path of a call, which ``describe`` puts in words; compiled code says nothing, as it is traced once."""
    if torch.compiler.is_compiling() or not is_logging():
        return
    path = describe()
    _log.debug("%s: %s", function, path)
    if _recorder is not None and (function, path) not in _recorder:
        _recorder.append((function, path))


def is_logging() -> bool:
    """Return whether somebody wants to hear of paths."""
    return _recorder is not None or _log.isEnabledFor(logging.DEBUG)


def is_recording() -> bool:
    """Return whether :func:`recording` is on."""
    return _recorder is not None


@contextmanager
def recording() -> Iterator[list[tuple[str, str]]]:
    """Collect the paths of the calls inside."""
    global _recorder
    outer, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = outer
