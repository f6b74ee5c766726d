"""Nested lists, tuples and dictionaries."""

import copy
from collections.abc import Callable, Iterator
from typing import Any


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of a nested structure with ``function`` applied to each leaf."""
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the class
        for key, one in value.items():
            copied[key] = map_nested(function, one)
        return copied
    if isinstance(value, (list, tuple)):
        mapped = [map_nested(function, one) for one in value]
        return value._make(mapped) if hasattr(value, "_make") else type(value)(mapped)
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a nested structure: whatever is not a list, tuple or dictionary."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    else:
        yield value
