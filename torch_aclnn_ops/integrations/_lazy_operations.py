"""Rules for operations on lazy logits, by name: each returns a deferred result, or a loss, or None to materialize.

Deferred results are logits, and the log-softmax of logits, of which losses take one class or the sum of all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch_aclnn_ops._checks import Reduction
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.integrations._logit_sums import LogitSum

import torch
from torch import Tensor, nn


class LogProbabilities(NamedTuple):
    """The log-softmax over the classes of contiguous logits, times ``sign``."""

    logits: LogitSum
    sign: int = 1

    def negated(self) -> "LogProbabilities":
        """Return the negative log-probabilities."""
        return LogProbabilities(self.logits, -self.sign)

    def gathered(self, dim: int, index: Tensor) -> Tensor | None:
        """Return what ``gather`` does, if it takes one class of each row."""
        rows = (*self.logits.shape[:-1], 1)
        if not self._is_last(dim) or index.dtype != torch.int64 or index.shape != rows:
            return None
        # No index is ignored: this one is out of range for gather too.
        return self._loss(index.reshape(-1), index.shape, ignore_index=torch.iinfo(torch.int64).min)

    def summed(self, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the sum over the classes."""
        if not self._is_last(dim) or not (dtype is None or dtype.is_floating_point):
            return None
        dtype = dtype or self.logits.dtype
        # As torch's sum, it is rounded once, at the end: that of float16 terms may fit into float32 only.
        logits = self.logits.cast(accumulation_dtype(dtype))
        if logits is None:
            return None
        sizes = logits.shape[:-1]
        target = torch.zeros(torch.Size(sizes).numel(), dtype=torch.int64, device=logits.device)
        # Smoothed by 1, the loss is the mean of all classes.
        mean = LogProbabilities(logits, self.sign)._loss(target, (*sizes, 1) if keepdim else sizes, label_smoothing=1.0)
        return None if mean is None else (mean * logits.classes).to(dtype)

    def nll_loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
    ) -> Tensor | None:
        """Return what ``nll_loss`` does of rows: the cross entropy, if the sign is 1."""
        if self.sign != 1 or len(self.logits.shape) != 2 or size_average is not None or reduce is not None:
            return None
        return self.logits.cross_entropy(target, weight=weight, ignore_index=ignore_index, reduction=reduction)

    def _is_last(self, dim: int) -> bool:
        return type(dim) is int and dim in (-1, len(self.logits.shape) - 1)

    def _loss(self, target: Tensor, sizes: tuple[int, ...], **options: int | float) -> Tensor | None:
        rows = self.logits.viewed(self.logits.probe().view(-1, self.logits.classes))
        loss = rows.cross_entropy(target, reduction="none", **options)
        return None if loss is None else (-self.sign * loss).to(self.logits.dtype).reshape(sizes)


def log_probabilities(
    logits: LogitSum, dim: int, _stacklevel: int | torch.dtype = 3, dtype: torch.dtype | None = None
) -> LogProbabilities | None:
    """Return the log-softmax of logits; None if it is not over the classes of whole rows."""
    if isinstance(_stacklevel, torch.dtype):  # the second argument of the method is the third of the function
        dtype = _stacklevel
    if type(dim) is not int or dim not in (-1, len(logits.shape) - 1) or len(logits.shape) < 2:
        return None
    # Autocast decides by the device.
    dtype = dtype or torch.empty(0, 1, dtype=logits.dtype, device=logits.device).log_softmax(-1).dtype
    rows = logits.contiguous_rows() if dtype.is_floating_point else None
    rows = rows and rows.cast(dtype)
    return None if rows is None else LogProbabilities(rows)


Deferred = LogitSum | LogProbabilities
Rule = Callable[..., Deferred | Tensor | None]


def _view(name: str) -> Rule:
    def view(logits: LogitSum, *args: Any, **kwargs: Any) -> LogitSum | None:
        if any(isinstance(one, Tensor) for one in (*args, *kwargs.values())):
            return None
        try:
            viewed = getattr(logits.probe(), name)(*args, **kwargs)
            return logits.viewed(viewed) if viewed.dtype == logits.dtype else None
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None  # the operation on materialized logits raises

    return view


def _reshape(name: str) -> Rule:
    view, view_as = _view(name), _view("view")

    def reshape(logits: LogitSum, *args: Any, **kwargs: Any) -> Any:
        probe = logits.probe()
        if probe.is_contiguous():
            return view(logits, *args, **kwargs)
        if torch.compiler.is_compiling():  # an error of a view cannot be caught
            return None
        try:
            sizes = getattr(probe, name)(*args, **kwargs).shape
        except (IndexError, RuntimeError, TypeError):
            return None  # the operation on materialized logits raises
        rows = logits.contiguous_rows()
        # A view if torch can make one, else a copy of the rows.
        return view_as(logits, sizes) or (rows and view_as(rows, sizes))

    return reshape


def _getitem(logits: LogitSum, index: Any) -> LogitSum | None:
    if isinstance(index, Tensor):
        return logits.selected(index)
    places = index if isinstance(index, tuple) else (index,)
    if not all(one is None or one is Ellipsis or type(one) in (int, slice) for one in places):
        return None
    probe = logits.probe()
    try:
        view = probe[index]
    except (IndexError, TypeError, ValueError):
        return None  # the operation on materialized logits raises
    return logits.viewed(view, _offset(probe, places))


def _offset(tensor: Tensor, index: tuple[Any, ...]) -> int:
    """Return the storage offset of a view by an index; Dynamo does not support ``storage_offset``."""
    dims = [one for one in index if one is not None and one is not Ellipsis]
    missing, dim, offset = tensor.ndim - len(dims), 0, 0
    for one in index:
        if one is None:
            continue
        if one is Ellipsis:
            dim += missing
            continue
        size, start = tensor.shape[dim], (one.start or 0) if isinstance(one, slice) else one
        if start < 0:
            start = max(start + size, 0)
        offset += min(start, size) * tensor.stride(dim)
        dim += 1
    return offset


def _contiguous(logits: LogitSum, **kwargs: Any) -> LogitSum | None:
    if kwargs:
        return None
    return logits if logits.probe().is_contiguous() else logits.contiguous_rows()


def _clone(logits: LogitSum, **kwargs: Any) -> LogitSum | None:
    return None if kwargs else logits.cast(logits.dtype)


def _to(logits: LogitSum, *args: Any, **kwargs: Any) -> LogitSum | None:
    """Cast to a dtype; a device must be that of the logits."""
    given = dict(kwargs)
    for one in args:
        name = "dtype" if isinstance(one, torch.dtype) else "device" if isinstance(one, (str, torch.device)) else ""
        if not name or name in given:
            return None
        given[name] = one
    dtype, device = given.pop("dtype", None) or logits.dtype, given.pop("device", None) or logits.device
    if given or not dtype.is_floating_point or not _is_on(device, logits.device):
        return None
    return logits if dtype == logits.dtype else logits.cast(dtype)


def _is_on(device: Any, there: torch.device) -> bool:
    """Return whether a device, possibly without an index, is ``there``."""
    return torch.device(device) == there or torch.empty(0, device=device).device == there


def _cast(dtype: torch.dtype) -> Rule:
    return lambda logits: _to(logits, dtype)


def _mul(logits: LogitSum, number: Any) -> LogitSum | None:
    is_factor = type(number) in (int, float) and number > 0
    return logits.divided(1 / number) if is_factor else None


def _cross_entropy(
    logits: LogitSum,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute :func:`torch.nn.functional.cross_entropy` of lazy logits; return None if it needs the logits."""
    if size_average is not None or reduce is not None:
        reduction = cast(Reduction, nn.CrossEntropyLoss(None, size_average, reduce=reduce).reduction)  # warns
    return logits.cross_entropy(
        target, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


# Operations whose result is a view of the logits.
VIEWS: dict[str, Rule] = {
    **{name: _view(name) for name in "view transpose swapaxes swapdims permute unsqueeze squeeze unflatten".split()},
    **{name: _reshape(name) for name in ("reshape", "flatten")},
    "__getitem__": _getitem,
}
RULES: dict[str, Rule] = {
    **VIEWS,
    "contiguous": _contiguous,
    "clone": _clone,
    "to": _to,
    "float": _cast(torch.float32),
    "double": _cast(torch.float64),
    "half": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "tanh": LogitSum.tanh,
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), LogitSum.divided),
    **dict.fromkeys(("add", "__add__", "__radd__"), LogitSum.plus),
    "cross_entropy": _cross_entropy,
    "log_softmax": log_probabilities,
}
_OF_LOG_PROBABILITIES: dict[str, Rule] = {
    **dict.fromkeys(("neg", "negative", "__neg__"), LogProbabilities.negated),
    "gather": LogProbabilities.gathered,
    "sum": LogProbabilities.summed,
    "nll_loss": LogProbabilities.nll_loss,
}
METHODS = {name for name in RULES.keys() | _OF_LOG_PROBABILITIES.keys() if hasattr(Tensor, name)}
# Keyed by the function that ``__torch_function__`` receives.
NAMES: dict[Any, str] = {
    getattr(owner, name): name
    for owner in (Tensor, torch, nn.functional)
    for name in RULES.keys() | _OF_LOG_PROBABILITIES.keys()
    if hasattr(owner, name)
}


def name_of(function: Any) -> str:
    """Return the name of a function that ``__torch_function__`` receives."""
    owner = getattr(function, "__self__", None)  # a property's descriptor
    return getattr(owner if function.__name__ in ("__get__", "__set__") else function, "__name__", str(function))


def apply(name: str, logits: Deferred, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred | Tensor | None:
    """Return the result of an operation: ``logits`` itself for a no-op, None if it needs the logits."""
    rule = (RULES if isinstance(logits, LogitSum) else _OF_LOG_PROBABILITIES).get(name)
    try:
        return rule and rule(logits, *args, **kwargs)
    except TypeError:  # unsupported arguments
        return None
