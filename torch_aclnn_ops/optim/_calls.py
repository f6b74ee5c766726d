"""Detection of conflicting method calls of an optimizer: the second one raises before it writes anything."""

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from torch_aclnn_ops._checks import describe

import torch

_READS = ("state_dict", "ema_state_dict", "save_ema_model", "__getstate__")  # these may run concurrently


class MethodCall:
    """A running method call, and the thread it runs on."""

    def __init__(self, method: str) -> None:
        self.method, self.thread = method, get_ident()

    def conflict_with(self, other: "MethodCall", in_closure: bool) -> str | None:
        """Return why this call must not begin while another one is running, or ``None``.

        Inside the closure of a step nothing has been written yet, so its thread may call other methods.
        """
        if self.method in _READS and other.method in _READS:
            return None
        if other.method == "swap_ema_params":
            return INSIDE_SWAP_MESSAGE
        is_same_thread = self.thread == other.thread
        if other.method == "step":
            is_nested = in_closure and self.method != "step"
        else:
            # Reading FSDP1's parameters needs a swap.
            is_nested = self.method != "step" and (self.method != "swap_ema_params" or other.method in _READS)
        if is_same_thread and is_nested:
            return None
        where = "" if is_same_thread else " in another thread"
        return f"{other.method}() of the same optimizer is running{where}; wait until it has returned"


INSIDE_SWAP_MESSAGE = "inside swap_ema_params() the parameters hold their EMA weights; leave the with block first"


_Method = TypeVar("_Method", bound=Callable[..., Any])


def exclusive(method: _Method) -> _Method:
    """Decorate a method to raise while a conflicting call of the optimizer is running."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Dynamo guards on the emptiness of _calls.
            if self._calls:
                raise RuntimeError(f"{type(self).__name__}.{method.__name__}: {INSIDE_SWAP_MESSAGE}")
            return method(self, *args, **kwargs)
        call = MethodCall(method.__name__)
        try:
            self._begin(call)
            return method(self, *args, **kwargs)
        finally:
            # A single C call, which no signal handler can interrupt, so that no finished call remains.
            self._calls.pop(call, None)

    return checked  # type: ignore[return-value]


def begin(calls: dict[MethodCall, None], call: MethodCall, in_closure: bool, name: str) -> None:
    """Add a call to the running ones; raise if it conflicts with one that began before.

    Each operation on the dict is a single C call, so all threads see the same order.
    """
    calls[call] = None
    for other in calls.copy():
        if other is call:
            return
        conflict = call.conflict_with(other, in_closure)
        if conflict:
            raise RuntimeError(f"{name}.{call.method}: {conflict}")


def call_closure(optimizer: Any, closure: Callable[[], float]) -> float:
    """Call the closure of an optimizer's step, which may call other methods of it."""
    if not callable(closure):
        raise TypeError(
            f"{type(optimizer).__name__}.step: closure must be a function or None, but it is {describe(closure)}"
        )
    optimizer._in_closure = True
    try:
        with torch.enable_grad():
            return closure()
    finally:
        optimizer._in_closure = False
