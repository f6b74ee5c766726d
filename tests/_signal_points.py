"""Interrupts at each place where CPython may run a signal handler, one after another, without a timer."""

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# Once Dynamo evaluates frames, Python also checks for signals after calls of Python functions.
_CHECKED_AFTER = {code for name, code in dis.opmap.items() if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))}
_CODE = ("torch_aclnn_ops", str(Path("torch", "optim", "optimizer.py")))
Place = tuple[tuple[CodeType, int], ...]


class SignalPoints:
    """Trace an action, and raise ``KeyboardInterrupt`` at one of the places.

    Args:
        nth: The place, counted from 0; ``None`` to raise nowhere.

    Attributes:
        places: Where a signal handler might have run: the callers' code, innermost first.
    """

    def __init__(self, nth: int | None = None) -> None:
        self.places: list[Place] = []
        self._nth = nth
        self._last: dict[FrameType, int] = {}

    def run(self, action: Callable[[], None]) -> None:
        previous = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        finally:
            sys.settrace(previous)
            self._last.clear()

    def first_and_last(self, file: str = "") -> list[int]:
        """Return the numbers of the places in a file, without those between the first and the last pass of a loop."""
        first: dict[Place, int] = {}
        last: dict[Place, int] = {}
        for i, place in enumerate(self.places):
            if file not in place[0][0].co_filename:
                continue
            first.setdefault(place, i)
            last[place] = i
        return sorted({*first.values(), *last.values()})

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in _CODE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if last in _CHECKED_AFTER:
                self._reach(frame)
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace

    def _reach(self, frame: FrameType) -> None:
        place: list[tuple[CodeType, int]] = []
        caller: FrameType | None = frame
        while caller is not None and any(name in caller.f_code.co_filename for name in _CODE):
            place.append((caller.f_code, caller.f_lasti))
            caller = caller.f_back
        self.places.append(tuple(place))
        if len(self.places) - 1 == self._nth:
            sys.settrace(None)
            raise KeyboardInterrupt
