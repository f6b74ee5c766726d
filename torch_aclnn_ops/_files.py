"""Replace files atomically."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "b", **options: Any) -> Iterator[IO[Any]]:
    """Open a temporary file that atomically replaces ``path`` when the block exits, with default permissions.

    The target of a symbolic link is replaced, and the link is kept. Device nodes and FIFOs are written to directly. A
    killed process leaves its temporary file, ``.NAME.`` and 32 hexadecimal digits, next to the target.

    Args:
        path: The file to replace; it is unchanged after an exception.
        mode: ``"b"`` for bytes or ``"t"`` for text.
        **options: Further arguments of ``open``.

    Raises:
        OSError: The file cannot be written. Libraries such as ``torch.save`` raise errors of their own.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, replacing(f"{folder}/name", "t") as file:
        ...     file.write("contents")
        8
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(path, f"w{mode}", **options) as file:
            yield file
        return
    temporary = target.with_name(f".{target.name[:50]}.{uuid.uuid4().hex}")  # at most 255 bytes
    try:
        with open(temporary, f"w{mode}", **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
