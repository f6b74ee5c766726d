"""Lazy logits for compiled code and transforms, which do not support the tensor subclass."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops._nested import map_nested
from torch_aclnn_ops.integrations import _lazy_operations
from torch_aclnn_ops.integrations._lazy_operations import NAMES, RULES, VIEWS
from torch_aclnn_ops.integrations._logit_sums import LogitSum

import torch
from torch import Tensor


class TracedLogits:
    """Lazy logits that are not a tensor, because Dynamo does not trace unregistered tensor subclasses.

    Operators, methods and functions of torch are deferred as by :class:`LazyLogits`, or materialize the logits. Hooks
    are registered on the materialized logits.

    Args:
        logits: the result, from which a loss is computed.
        method: name of the first operand's method that computes the logits.
        operands: the object and its positional arguments; lazy ones are materialized first.
        kwargs: keyword arguments of the method.
    """

    def __init__(self, logits: LogitSum, method: str, operands: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._logits = logits
        self._method = method
        self._operands = operands
        self._kwargs = kwargs
        self._tensor: Tensor | None = None
        self.dtype = logits.dtype
        self.device = logits.device
        self.shape = torch.Size(logits.shape)

    @property
    def is_materialized(self) -> bool:
        """Whether the logits, or a base of which they are a view, were materialized."""
        return self._tensor is not None or (self._method in VIEWS and self._operands[0].is_materialized)

    def materialize(self) -> Tensor:
        """Materialize the logits once, and return the same tensor in every call."""
        if self._tensor is None:
            with torch.enable_grad():  # later uses may need a graph, even if the first one does not
                self._tensor = self._compute()
        return self._tensor

    def _compute(self) -> Tensor:
        # Materialized operands may have been modified in-place, so only views are taken of them.
        is_view = self._method in VIEWS
        first, *others = [
            (one.materialize() if is_view else one._compute()) if isinstance(one, TracedLogits) else one
            for one in self._operands
        ]
        logits: Tensor = getattr(first, self._method)(*others, **self._kwargs)
        return logits

    def _derive(self, name: str, *args: Any, **kwargs: Any) -> Any:
        operands = (self, *args)
        is_materialized = any(isinstance(one, TracedLogits) and one.is_materialized for one in operands)
        if torch.is_grad_enabled() and not is_materialized:
            sums = tuple(one._logits if isinstance(one, TracedLogits) else one for one in args)
            logits = _lazy_operations.defer(name, self._logits, sums, kwargs)
            if logits is self._logits:
                return self
            if logits is not None:
                return TracedLogits(logits, name, operands, kwargs)
        first, *others = map(traced_tensor, operands)
        return getattr(first, name)(*others, **kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, TracedLogits):
            if function is torch.nn.functional.cross_entropy and not first.is_materialized:
                loss = _lazy_operations.cross_entropy(first._logits, *args[1:], **kwargs)
                if loss is not None:
                    return loss
            elif function in NAMES:
                return first._derive(NAMES[function], *args[1:], **kwargs)
        args, kwargs = map_nested(traced_tensor, (args, kwargs))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.materialize(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    __hash__ = object.__hash__


def traced_tensor(value: Any) -> Any:
    """Materialize lazy logits; other values are returned unchanged."""
    return value.materialize() if isinstance(value, TracedLogits) else value


def _derived(name: str) -> Callable[..., Any]:
    def call(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        return self._derive(name, *args, **kwargs)

    return call


def _computed(name: str) -> Callable[..., Any]:
    def call(self: TracedLogits, *operands: Any) -> Any:
        return getattr(self.materialize(), name)(*map(traced_tensor, operands))

    return call


# Python looks up special methods on the class, without __getattr__.
for _name in RULES:
    setattr(TracedLogits, _name, _derived(_name))
for _name in (
    "sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert and or xor lt le eq ne gt"
    " ge setitem iter len contains bool int float array"
).split():
    setattr(TracedLogits, f"__{_name}__", _computed(f"__{_name}__"))
