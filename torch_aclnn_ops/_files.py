"""Write files so that a reader meets the old one or the whole new one."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "b", **options: Any) -> Iterator[IO[Any]]:
    """Open a file that takes the place of another one when it is written, with the permissions that any new file gets.

    Args:
        path: The file that is replaced; it stays as it is after an exception.
        mode: ``"b"`` for bytes or ``"t"`` for text.
        **options: What ``open`` takes besides.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, replacing(f"{folder}/name", "t") as file:
        ...     file.write("contents")
        8
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with open(unfinished, f"x{mode}", **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
