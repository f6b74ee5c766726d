"""Atomic file writes: a reader never sees a partial file.

The package has such a function, but it is private, and the examples use only the public API.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch


@contextmanager
def replacing(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """Open a file that atomically replaces ``path`` on success; after an exception ``path`` is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open(mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save_atomically(contents: object, path: Path) -> None:
    """Write ``contents`` with ``torch.save`` so that ``path`` holds either its old contents or all of the new."""
    with replacing(path) as file:
        torch.save(contents, file)
