"""Calls of functions in a new process with two simulated NPUs, which takes a tenth of a second."""

from collections.abc import Callable
from typing import Any

from host_npu import testing


def _called(device: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


def on_npu(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Return the result of a function of a module that does not use a device at import."""
    options = {"device": "npu", "devices": 2, "backend": "", "environment": environment}
    [result] = testing.run(_called, 1, function, arguments, **options)
    return result


def error_of(call: Callable[[], object]) -> str:
    """Return the error that a call raises, or an empty string."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
