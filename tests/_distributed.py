"""The devices and world sizes with which tables of cases run, and the selected cases."""

from collections.abc import Iterable
from typing import Any

import pytest

DEVICES = ("cpu", "npu")


def groups(*world_sizes: int, often: Iterable[tuple[str, int]]) -> list[Any]:
    """Return pairs of device and world size to run a table with; pairs that are not in ``often`` are exhaustive."""
    pairs = [(device, world_size) for device in DEVICES for world_size in world_sizes]
    return [pytest.param(pair, marks=[] if pair in often else [pytest.mark.exhaustive]) for pair in pairs]


def selected(request: pytest.FixtureRequest, argument: str, **others: Any) -> list[Any]:
    """Return the values of an argument in a file's selected tests that have these other arguments."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    given = [item.callspec.params for item in items if argument in item.callspec.params]
    return list(dict.fromkeys(one[argument] for one in given if others.items() <= one.items()))
