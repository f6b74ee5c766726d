"""How far a step of the optimizer is: what belongs to one parameter changes together, or not at all."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Call = partial[Any]


class StepProgress:
    """The parameters that a step has updated, and what it began and could not finish.

    Python handles signals between bytecodes. The calls of one parameter, or of one batch, are made by C code, where no
    signal comes between them, and the list of their results says at any time how many were made.

    Attributes:
        updated: the step counts of the parameters that are updated.
    """

    def __init__(self) -> None:
        self.updated: list[Tensor] = []
        self._calls: Sequence[Call] = ()
        self._results: list[object] = []

    def run(
        self,
        calls: list[Call],
        steps: Sequence[Tensor],
        undo: Call | None = None,
        is_written: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make calls that belong together. After an exception all of them are made, or none, if that is possible.

        Args:
            calls: what writes to a parameter and to its states.
            steps: the step counts of the parameters.
            undo: takes back the first call; without it, all calls may be made twice.
            is_written: after an exception in the second call, whether that has written nevertheless.
        """
        if torch.compiler.is_compiling():
            for call in calls:
                call()
            return
        calls.append(partial(self.updated.extend, steps))
        self._begin(calls)
        try:
            self.finish()
        except BaseException as error:
            self._settle(steps, undo, is_written)
            if self.is_torn():
                add_note(error, self._describe_torn(steps))
            raise

    def finish(self) -> None:
        """Make the calls that are left, if any."""
        self._results.extend(map(partial.__call__, self._calls[len(self._results) :]))
        self._calls = ()  # they hold gradients

    def is_torn(self) -> bool:
        """Return whether calls are left that :meth:`finish` has to make before anything else is done."""
        return len(self._results) < len(self._calls)

    def _begin(self, calls: Sequence[Call]) -> None:
        self._calls, self._results = calls, []

    def _settle(self, steps: Sequence[Tensor], undo: Call | None, is_written: Callable[[], bool]) -> None:
        """Take back the first call if it is the only one, else make the others; a second failure leaves them."""
        if not self._results or not self.is_torn():
            self._calls = ()
            return
        if undo is not None and len(self._results) == 1 and not is_written():
            self._begin([undo])
        else:
            written = max(len(self._results), 2 if undo is not None else 0)
            self._begin(self._calls[written:-1])
            self.updated.extend(steps)  # now, or when the rest is made
        try:
            self.finish()
        except Exception as error:
            warnings.warn(f"FusedEmaAdam: a second attempt to finish an update failed as well: {error}", stacklevel=2)

    def _describe_torn(self, steps: Sequence[Tensor]) -> str:
        return (
            f"FusedEmaAdam: {len(steps)} of these are half updated, and the device refuses to go on. What is missing is"
            " kept, and is done first by the next call of step(), state_dict() or swap_ema_params()"
        )


def add_note(error: BaseException, note: str) -> None:
    """Add a sentence to an exception; before Python 3.11, which has no notes, warn."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        warnings.warn(note, stacklevel=3)


def ranges(indices: Iterable[int]) -> str:
    """Write ascending numbers shortly, such as ``0-3, 7``."""
    pairs: list[list[int]] = []
    for index in indices:
        if pairs and pairs[-1][1] == index - 1:
            pairs[-1][1] = index
        else:
            pairs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)
