"""On which devices, and in how many processes, tables of cases run."""

from collections.abc import Iterable
from typing import Any

import pytest

DEVICES = ("cpu", "npu")


def groups(*world_sizes: int, often: Iterable[tuple[str, int]]) -> list[Any]:
    """Return pairs of device and world size to run a table with; those that are not in ``often`` are exhaustive."""
    pairs = [(device, world_size) for device in DEVICES for world_size in world_sizes]
    return [pytest.param(pair, marks=[] if pair in often else [pytest.mark.exhaustive]) for pair in pairs]
