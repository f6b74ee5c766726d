"""Calls of an optimizer's methods that meet: the second one is refused before it writes anything."""

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

import torch

_READS = ("state_dict", "ema_state_dict", "save_ema_model", "__getstate__")  # which may meet each other


class MethodCall:
    """A call of a method that has begun and is not over; it belongs to the thread that makes it."""

    def __init__(self, method: str) -> None:
        self.method, self.thread = method, get_ident()

    def problem_with(self, other: "MethodCall", in_closure: bool) -> str | None:
        """Say why this call must not begin before another one is over, or return None.

        Inside the closure of a step nothing is written yet, so its thread may call what ends there.
        """
        if self.method in _READS and other.method in _READS:
            return None
        if other.method == "swap_ema_params":
            return INSIDE_SWAP
        is_same_thread = self.thread == other.thread
        if other.method == "step":
            is_nested = in_closure and self.method != "step"
        else:
            # FSDP1's parameters are read in a swap.
            is_nested = self.method != "step" and (self.method != "swap_ema_params" or other.method in _READS)
        if is_same_thread and is_nested:
            return None
        where = "" if is_same_thread else " in another thread"
        return f"{other.method}() of the same optimizer is running{where}; wait until it has returned"


INSIDE_SWAP = "inside swap_ema_params() the parameters hold their averages; leave the with block first"


_Method = TypeVar("_Method", bound=Callable[..., Any])


def exclusive(method: _Method) -> _Method:
    """Make a method that is refused while another call of the optimizer runs that it must not meet."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Code that was compiled while there was none is not used while there are some.
            if self._calls:
                raise RuntimeError(f"{type(self).__name__}.{method.__name__}: {INSIDE_SWAP}")
            return method(self, *args, **kwargs)
        call = MethodCall(method.__name__)
        try:
            self._begin(call)
            return method(self, *args, **kwargs)
        finally:
            # One call of C code, before which no signal is handled: no call stays that is over.
            self._calls.pop(call, None)

    return checked  # type: ignore[return-value]


def begin(calls: dict[MethodCall, None], call: MethodCall, in_closure: bool, name: str) -> None:
    """Add a call to those that run; raise if one of them began before and must not meet it.

    Each operation on the dict is one call of C code, so threads see one order of calls.
    """
    calls[call] = None
    for other in calls.copy():
        if other is call:
            return
        problem = call.problem_with(other, in_closure)
        if problem:
            raise RuntimeError(f"{name}.{call.method}: {problem}")
