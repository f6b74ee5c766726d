"""Saving files so that a reader never meets half of one."""

import os
from pathlib import Path

import torch


def save_atomically(contents: object, path: Path) -> None:
    """Write ``contents`` with ``torch.save`` so that ``path`` holds either its old contents or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
