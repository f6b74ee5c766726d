"""Count the calls of training steps by implementation."""

import os
import textwrap
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch_aclnn_ops import _extension
from torch_aclnn_ops._call_log import Implementation, listening

import torch

# Beginnings of the names of files of torch, of this package, and of those that FX generates.
_SKIPPED = (*(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__)), "<eval_with_key>")
_NOTHING = "no operator of torch_aclnn_ops was called"


class _Kind(NamedTuple):
    """The key that calls are counted by."""

    function: str
    implementation: Implementation
    detail: str
    called_from: str


class Report:
    """The context manager that :func:`report` returns, which counts the calls of all threads.

    ``str(report)`` is a table, and ``as_dict()`` has the same counts. A report can be reused, and continues counting.
    """

    def __init__(self) -> None:
        self._calls: Counter[_Kind] = Counter()
        self._launches: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._open: list[tuple[ExitStack, dict[str, int]]] = []

    def __enter__(self) -> "Report":
        stack = ExitStack()
        if not self._open:  # a nested report counts each call once
            stack.enter_context(listening(self._count))
        self._open.append((stack, _extension.launches()))
        return self

    def __exit__(self, *_: object) -> None:
        stack, before = self._open.pop()
        stack.close()
        if not self._open:
            self._launches.update(_launches_since(before))

    def _count(self, function: str, implementation: Implementation, detail: str, calls: int) -> None:
        kind = _Kind(function, implementation, detail, _called_from())
        with self._lock:
            self._calls[kind] += calls

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a dict that ``json.dumps`` accepts.

        Returns:
            ``{"operators": {name: counts}, "launches": {name: number}}``. The counts of an operator are ``calls``;
            ``cann``, ``torch`` and ``fallback``, which sum to ``calls``; and ``reasons``, a list of dicts
            with ``implementation``, ``reason``, ``called_from`` and ``calls``. ``launches`` counts the launches of
            CANN's operators by this package, including those of compiled code.

        Example:
            >>> Report().as_dict()
            {'operators': {}, 'launches': {}}
        """
        operators: defaultdict[str, dict[str, Any]] = defaultdict(
            lambda: {"calls": 0, **{each.name.lower(): 0 for each in Implementation}, "reasons": []}
        )
        with self._lock:
            counted = sorted(self._calls.items(), key=lambda item: (item[0].function, -item[1]))
        for kind, calls in counted:
            implementation = kind.implementation.name.lower()
            operator = operators[kind.function]
            operator["calls"] += calls
            operator[implementation] += calls
            described = {"implementation": implementation, "reason": kind.detail, "called_from": kind.called_from}
            operator["reasons"].append({**described, "calls": calls})
        launches = self._launches + (_launches_since(self._open[0][1]) if self._open else Counter())
        return {"operators": dict(operators), "launches": dict(sorted(launches.items()))}

    def __str__(self) -> str:
        return "\n".join(self._lines()) or _NOTHING

    def _lines(self) -> Iterator[str]:
        counts = self.as_dict()
        if counts["operators"]:
            width = max(map(len, counts["operators"]))
            yield f"{'operator':<{width}}  calls  CANN  torch  fallback"
            for name, operator in counts["operators"].items():
                yield f"{name:<{width}}" + "".join(
                    f"  {operator[column] or '-':>{size}}"
                    for column, size in (("calls", 5), ("cann", 4), ("torch", 5), ("fallback", 8))
                )
                for reason in operator["reasons"]:
                    sentence = Implementation[reason["implementation"].upper()].describe(reason["reason"])
                    text = f"{reason['calls']} from {reason['called_from']}: {sentence}"
                    yield from textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="        ")
        if counts["launches"]:
            yield "launches: " + ", ".join(f"{name} {number}" for name, number in counts["launches"].items())


def report() -> Report:
    """Count calls by implementation: CANN's operator, PyTorch's kernel, or the fallback.

    Inside the ``with`` block, calls of this package have a small overhead, because they go through Python; results do
    not change. In code that is compiled by ``torch.compile``, calls of ``linear_cross_entropy`` and ``linear_kl_div``
    and steps of ``FusedEmaAdam`` are counted; of other drop-ins and of raw operators, only the launches are.

    Returns:
        A :class:`Report`, to use in a ``with`` statement around any number of steps.

    Example:
        >>> import torch
        >>> from torch_aclnn_ops import functional as F
        >>> with report() as counts:
        ...     F.mse_loss(torch.ones(2, requires_grad=True), torch.zeros(2)).backward()
        >>> operator = counts.as_dict()["operators"]["mse_loss_backward"]
        >>> operator["calls"], operator["cann"], operator["torch"], operator["fallback"]
        (1, 0, 1, 0)
    """
    return Report()


def _launches_since(before: dict[str, int]) -> Counter[str]:
    return +Counter({name: count - before.get(name, 0) for name, count in _extension.launches().items()})


def _called_from() -> str:
    """Return the file and line of the innermost caller outside torch and this package, as in a traceback."""
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # set by the user, or by Inductor
    skipped = _SKIPPED if generated is None else (*_SKIPPED, os.path.join(generated, ""))
    for caller in reversed(traceback.extract_stack()):
        path = caller.filename
        if not path.startswith(skipped):
            relative = os.path.relpath(path) if os.path.isabs(path) else path
            return f"{path if relative.startswith(os.pardir) else relative}:{caller.lineno}"
    return "a thread of autograd"
