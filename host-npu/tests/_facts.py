"""What programs find out for tests: functions whose results are printed as JSON."""

from collections.abc import Callable

facts: dict[str, Callable[[], object]] = {}


def fact(function: Callable[[], object]) -> Callable[[], object]:
    """Print what ``function`` returns."""
    facts[function.__name__] = function
    return function


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""
