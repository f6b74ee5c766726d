"""Write files so that a reader meets the old one or the whole new one."""

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

# The streams of this process, whatever is behind them.
_STREAMS = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "b", **options: Any) -> Iterator[IO[Any]]:
    """Open a file that takes the place of another one when it is written, with the permissions that any new file gets.

    A symbolic link stays, and its target is replaced. Device nodes, FIFOs and ``/dev/stdout`` are written to. A process
    that is killed leaves an unfinished file beside the target, which the next one that writes the same file removes.

    Args:
        path: The file that is replaced; it stays as it is after an exception.
        mode: ``"b"`` for bytes or ``"t"`` for text.
        **options: What ``io.TextIOWrapper`` takes besides.

    Raises:
        OSError: The file cannot be written, also where a library that wrote to it has raised an exception of its own.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, replacing(f"{folder}/name", "t") as file:
        ...     file.write("contents")
        8
    """
    with _errors_naming(path):
        target = _replaceable(path)
        raw = _File(path, "w") if target is None else _unfinished(target)
    try:
        with raw:
            file: IO[Any] = io.BufferedWriter(raw)
            file = io.TextIOWrapper(file, **options) if mode == "t" else file
            yield file
            file.flush()
            with _errors_naming(path):
                if target is not None:
                    os.fsync(raw.fileno())
                    os.replace(raw.name, target)
    except Exception as error:
        if raw.failure is not None:
            raise _naming(path, raw.failure) from error
        raise
    finally:
        if target is not None:
            Path(raw.name).unlink(missing_ok=True)


class _File(io.FileIO):
    """A file that keeps the exception with which writing to it has failed: torch.save raises another one."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write some of the data; return how many bytes."""
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def _naming(path: str | os.PathLike[str], error: OSError) -> OSError:
    return OSError(error.errno, error.strerror, os.fspath(path))


@contextlib.contextmanager
def _errors_naming(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _naming(path, error) from error


def _replaceable(path: str | os.PathLike[str]) -> Path | None:
    """Return the regular file that a path leads to, or ``None`` where it leads to something else."""
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        is_regular = True
    if not is_regular or os.path.abspath(path).startswith(_STREAMS):
        return None
    return Path(os.path.realpath(path))


def _unfinished(target: Path) -> _File:
    """Create a file beside the target, which is locked while it is open; remove those that nobody has locked."""
    name = target.name[:50]  # what is added must fit the limit of 255 bytes
    abandoned = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}")
    # Without locks, as on some network file systems, nobody can know.
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
