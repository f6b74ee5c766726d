"""Calls of functions in a process of its own with two simulated NPUs, which takes a tenth of a second."""

from collections.abc import Callable
from typing import Any

from host_npu import testing


def _called(device: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def on_npu(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Return what a function of a module returns, which must use no device when it is imported."""
    options = {"device": "npu", "devices": 2, "backend": "", "environment": environment}
    [result] = testing.run(_called, 1, function, arguments, **options)
    return result


def error_of(call: Callable[[], object]) -> str:
    """Return what a call raises, or an empty text."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
