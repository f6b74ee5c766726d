"""Which implementation computes a call: the log, :func:`explain` for one call, and :func:`report` for training steps.

The logger is ``torch_aclnn_ops``, at level DEBUG. Messages are formatted only if they are recorded.
"""

import logging
import os
import textwrap
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from torch_aclnn_ops import _extension
from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._tensors import leaves, map_nested

import torch
from torch import Tensor

_log = logging.getLogger("torch_aclnn_ops")
# Beginnings of the names of files of torch, of this package, and of those that FX generates.
_SKIPPED = (*(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__)), "<eval_with_key>")


class Implementation(Enum):
    """The implementation of a call; the value is what precedes the operator's name or the reason."""

    CANN = ""
    TORCH = "native PyTorch kernel, because "
    FALLBACK = "PyTorch fallback, because "


# Takes a function, the implementation (None for a detail of a call that is logged elsewhere), the name of CANN's
# operator or the reason or detail, and the number of calls.
_Listener = Callable[[str, Implementation | None, str, int], None]
_listeners: list[_Listener] = []  # which hear of the calls of all threads


def log_call(function: str, implementation: Implementation, detail: Callable[[], str], calls: int = 1) -> None:
    """Record which implementation computes a call; a no-op in compiled code, which is traced only once.

    Args:
        function: the operator or function that is called.
        implementation: the implementation.
        detail: returns the name of CANN's operator, or the reason for another implementation.
        calls: the number of calls.
    """
    if is_logging():
        _record(function, implementation, detail(), calls)


def log_detail(function: str, detail: Callable[[], str]) -> None:
    """Record a detail of a call whose implementation is recorded elsewhere."""
    if is_logging():
        _record(function, None, detail(), 0)


def _record(function: str, implementation: Implementation | None, text: str, calls: int) -> None:
    _log.debug("%s: %s", function, _described(implementation, text))
    for listener in _listeners:
        listener(function, implementation, text, calls)


def _described(implementation: Implementation | None, text: str) -> str:
    return text if implementation is None else implementation.value + text


def is_logging() -> bool:
    """Return whether calls are recorded; always False in compiled code."""
    return not torch.compiler.is_compiling() and is_logging_in_eager_mode()


def is_logging_in_eager_mode() -> bool:
    """Return whether calls are recorded, for callers that know that no code is being compiled."""
    return bool(_listeners) or _log.isEnabledFor(logging.DEBUG)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Run a call and the backward pass of its results, and return which implementations computed them, and why.

    The call is made as any other: the step of an optimizer updates its parameters, and a :func:`report` counts it. No
    ``.grad`` changes. The logger ``torch_aclnn_ops`` logs the same lines at level DEBUG. Calls that other threads make
    meanwhile are included.

    Args:
        function: A function or module that calls this package.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        One line per operator of this package that the call reaches.

    Raises:
        TypeError: ``function`` cannot be called.

    Example:
        >>> from torch_aclnn_ops import functional as F
        >>> print(explain(F.mse_loss, torch.ones(2, requires_grad=True), torch.ones(2)))
        mse_loss_backward: native PyTorch kernel, because the tensors are on cpu
    """
    if not callable(function):
        raise TypeError(f"explain: function must be a function or module, but it is {describe(function)}")

    def as_leaf(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    lines: dict[str, None] = {}  # each once

    def note(function: str, implementation: Implementation | None, text: str, _: int) -> None:
        lines[f"{function}: {_described(implementation, text)}"] = None

    _listeners.append(note)
    try:
        results = leaves(function(*map_nested(as_leaf, args), **map_nested(as_leaf, kwargs)))
        losses = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        if losses:
            # Not backward(), which would add to .grad; what the function refers to may be differentiated again.
            ones = [torch.ones_like(loss) for loss in losses]
            torch.autograd.grad(losses, _leaves(losses), ones, retain_graph=True, allow_unused=True)
    finally:
        _listeners.remove(note)
    if not lines:
        return "no operator of torch_aclnn_ops: torch's own functions compute this call"
    return "\n".join(lines)


def _leaves(losses: list[Tensor]) -> list[Tensor]:
    """Return the tensors to which a backward from the losses would add gradients."""
    leaves = [loss for loss in losses if loss.grad_fn is None]
    nodes = [loss.grad_fn for loss in losses]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes.extend(following for following, _ in node.next_functions)
    return leaves


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
        self._open: list[dict[str, int]] = []  # the launches before each block

    def __enter__(self) -> "Report":
        if not self._open:  # a nested report counts each call once
            _listeners.append(self._count)
        self._open.append(_extension.launches())
        return self

    def __exit__(self, *_: object) -> None:
        before = self._open.pop()
        if not self._open:
            _listeners.remove(self._count)
            self._launches.update(_launches_since(before))

    def _count(self, function: str, implementation: Implementation | None, detail: str, calls: int) -> None:
        if implementation is None:
            return
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
        launches = self._launches + (_launches_since(self._open[0]) if self._open else Counter())
        return {"operators": dict(operators), "launches": dict(sorted(launches.items()))}

    def __str__(self) -> str:
        return "\n".join(self._lines()) or "no operator of torch_aclnn_ops was called"

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
                    sentence = _described(Implementation[reason["implementation"].upper()], reason["reason"])
                    text = f"{reason['calls']} from {reason['called_from']}: {sentence}"
                    yield from textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="        ")
        if counts["launches"]:
            yield "launches: " + ", ".join(f"{name} {number}" for name, number in counts["launches"].items())


def report() -> Report:
    """Count calls by implementation: CANN's operator, PyTorch's kernel, or the fallback.

    Inside the ``with`` block, calls of this package have a small overhead, because they go through Python; results do
    not change. In code that is compiled by ``torch.compile``, calls of ``linear_cross_entropy`` and ``linear_kl_div``
    and steps of ``FusedEmaAdam`` are counted; for other drop-ins and raw operators, only launches are counted.

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
