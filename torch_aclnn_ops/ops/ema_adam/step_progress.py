"""Progress of an optimizer step: each parameter is updated together with its states, or not at all."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Call = partial[Any]


class StepProgress:
    """The parameters that a step has updated, and calls that remain after a failure.

    Python handles signals between bytecodes. The calls of one parameter, or of one batch, are made from C code, so that
    no signal handler runs between them, and the length of the list of results is the number of calls made.

    Attributes:
        updated: Step counts of the updated parameters.
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
        """Make calls that belong together: after an exception, if possible, all of them have taken effect or none.

        Args:
            calls: The calls that write to parameters and their states.
            steps: The step counts of the parameters.
            undo: Reverts the first call; if ``None``, all calls are idempotent.
            is_written: Returns whether the second call has written although it raised an exception.
        """
        if torch.compiler.is_compiling():
            for call in calls:
                call()
            return
        calls.append(partial(self.updated.extend, steps))
        try:
            self._begin(calls)
            self.finish()
        except BaseException as error:
            self._recover(steps, undo, is_written)
            if self.is_incomplete():
                add_note(error, self._describe_incomplete(steps))
            raise

    def finish(self) -> None:
        """Make the remaining calls, if any."""
        self._results.extend(map(partial.__call__, self._calls[len(self._results) :]))
        self._calls, self._results = (), []  # calls reference gradients

    def is_incomplete(self) -> bool:
        """Return whether there are calls that :meth:`finish` must make before the optimizer is used again."""
        return len(self._results) < len(self._calls)

    def _begin(self, calls: Sequence[Call]) -> None:
        self._calls, self._results = calls, []

    def _recover(self, steps: Sequence[Tensor], undo: Call | None, is_written: Callable[[], bool]) -> None:
        """Undo the first call if it is the only one made, else make the remaining ones, unless they fail again."""
        if not self._results or not self.is_incomplete():
            self._calls = ()
            return
        if undo is not None and len(self._results) == 1 and not is_written():
            self._begin([undo])
        else:
            written = max(len(self._results), 2 if undo is not None else 0)
            self._begin(self._calls[written:-1])
            self.updated.extend(steps)  # now, or once the remaining calls are made
        try:
            self.finish()
        except Exception as error:
            warnings.warn(f"FusedEmaAdam: a second attempt to finish an update failed as well: {error}", stacklevel=2)

    def _describe_incomplete(self, steps: Sequence[Tensor]) -> str:
        return (
            f"FusedEmaAdam: {len(steps)} of these are partially updated, because a second attempt failed too. The next"
            " call of step(), state_dict() or swap_ema_params() first finishes their update"
        )


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception; before Python 3.11, which lacks notes, warn."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        warnings.warn(note, stacklevel=3)


def format_ranges(indices: Iterable[int]) -> str:
    """Format ascending indices compactly, such as ``0-3, 7``."""
    pairs: list[list[int]] = []
    for index in indices:
        if pairs and pairs[-1][1] == index - 1:
            pairs[-1][1] = index
        else:
            pairs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)
