"""Replace files atomically."""

import contextlib
import fcntl
import io
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# Standard streams and file descriptors are written to directly.
_STREAMS = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "b", **options: Any) -> Iterator[IO[Any]]:
    """Open a temporary file that atomically replaces ``path`` when the block exits, with default permissions.

    The target of a symbolic link is replaced, and the link is kept. Device nodes, FIFOs and ``/dev/stdout`` are written
    to directly. A killed process leaves its temporary file next to the target; the next write to ``path`` removes it.

    Args:
        path: The file to replace; it is unchanged after an exception.
        mode: ``"b"`` for bytes or ``"t"`` for text.
        **options: Further arguments of ``io.TextIOWrapper``.

    Raises:
        OSError: The file cannot be written, even if a library such as ``torch.save`` raised its own exception.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, replacing(f"{folder}/name", "t") as file:
        ...     file.write("contents")
        8
    """
    with _add_path_to_errors(path):
        target = _replaceable(path)
        raw = _File(path, "w") if target is None else _unfinished(target)
    try:
        with raw:
            file: IO[Any] = io.BufferedWriter(raw)
            file = io.TextIOWrapper(file, **options) if mode == "t" else file
            yield file
            file.flush()
            with _add_path_to_errors(path):
                if target is not None:
                    os.fsync(raw.fileno())
                    os.replace(raw.name, target)
    except Exception as error:
        if raw.failure is not None:
            raise _with_path(path, raw.failure) from error
        raise
    finally:
        if target is not None:
            Path(raw.name).unlink(missing_ok=True)


class _File(io.FileIO):
    """A file that records the ``OSError`` of a failed write, because torch.save raises a different exception."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write some of the data; return how many bytes."""
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def _with_path(path: str | os.PathLike[str], error: OSError) -> OSError:
    return OSError(error.errno, error.strerror, os.fspath(path))


@contextlib.contextmanager
def _add_path_to_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _with_path(path, error) from error


def _replaceable(path: str | os.PathLike[str]) -> Path | None:
    """Resolve a path to a regular file, or return ``None`` if it is something else."""
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        is_regular = True
    if not is_regular or os.path.abspath(path).startswith(_STREAMS):
        return None
    return Path(os.path.realpath(path))


def _unfinished(target: Path) -> _File:
    """Create a temporary file next to the target, locked while open, and remove abandoned ones."""
    name = target.name[:50]  # leaves room for the suffix within the limit of 255 bytes
    abandoned = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}")
    # Some network file systems have no locks; abandoned files are not removed there.
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            if abandoned.fullmatch(path.name):
                with contextlib.suppress(OSError), open(path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
    while True:
        unfinished = _File(target.with_name(f".{name}.{uuid.uuid4().hex}"), "x")
        with contextlib.suppress(OSError):
            fcntl.flock(unfinished, fcntl.LOCK_EX)
        if os.path.exists(unfinished.name):  # another process may have removed it before it was locked
            return unfinished
        unfinished.close()
