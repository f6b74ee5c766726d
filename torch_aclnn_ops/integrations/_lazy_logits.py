"""Lazy logits: what the head of a patched model returns in training."""

from collections.abc import Callable, Iterator
from typing import Any

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform
from torch_aclnn_ops._tensors import leaves, map_nested
from torch_aclnn_ops._torch_compat.private import version_of
from torch_aclnn_ops.integrations import _lazy_operations
from torch_aclnn_ops.integrations._lazy_operations import METHODS, NAMES, VIEWS, LogProbabilities
from torch_aclnn_ops.integrations._logit_sums import LogitSum
from torch_aclnn_ops.integrations._materializations import Materializations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_METADATA = frozenset(
    "ndim itemsize layout is_sparse is_sparse_csr is_quantized is_nested is_mkldnn size dim ndimension numel nelement"
    " stride storage_offset is_contiguous is_floating_point is_complex is_signed is_inference element_size".split()
)
_OF_DEVICE = frozenset("is_cpu is_cuda is_npu is_xpu is_mps is_meta get_device".split())
_GRADIENTS = frozenset("register_hook retain_grad register_post_accumulate_grad_hook grad_fn".split())


class LazyLogits:
    """The logits of a head, which are materialized when an operation needs them, at most once.

    This is not a tensor, because the loss is computed without one, but operators, methods and functions of torch accept
    it like one. Operations with a rule in ``_lazy_operations`` are deferred, such as multiplying by a number, adding,
    casting or selecting rows, or are computed without logits, such as a cross entropy. All others get the materialized
    logits. Code that requires a ``torch.Tensor``, such as ``torch.autograd.Function.apply``, needs
    ``logits.materialize()``.

    Args:
        logits: the result, from which a loss is computed.
        function: the function that computes the logits.
        operands: its positional arguments; lazy ones are materialized first.
        kwargs: its keyword arguments.
        record: counts materializations and losses.
        is_view: whether the result is a view of the first operand.
    """

    def __init__(
        self,
        logits: LogitSum | LogProbabilities,
        function: Callable[..., Tensor],
        operands: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Materializations,
        is_view: bool = False,
    ) -> None:
        self._logits = logits
        self._function = function
        self._operands = operands
        self._kwargs = kwargs
        self._record = record
        self._is_view = is_view
        self._tensor: Tensor | None = None

    @property
    def is_materialized(self) -> bool:
        """Whether the logits, or a base of which they are a view, were materialized."""
        return self._tensor is not None or (self._is_view and self._operands[0].is_materialized)

    def materialize(self, why: str = "materialize") -> Tensor:
        """Materialize the logits once, and return the same tensor in every call.

        Args:
            why: the operation that needs the logits.
        """
        if self._tensor is not None:
            return self._tensor
        if not torch.compiler.is_compiling():
            self._record.add(_bare(why))
        # Later uses may need a graph, even if the first one does not.
        if torch.compiler.is_compiling() or in_functorch_transform():
            with torch.enable_grad():
                self._tensor = self._compute(self._is_view)
        else:
            # Bypass the hooks of torch.utils.checkpoint, which counts the tensors that are saved in its function.
            with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_with_version, _unchanged):
                self._tensor = self._compute(self._is_view)
            self._record.watch(self._tensor, _bare(why))
        return self._tensor

    def _compute(self, is_view: bool = False) -> Tensor:
        # Materialized operands may have been modified in-place, so only views are taken of them, not what is computed.
        operands = [
            (one.materialize() if is_view else one._compute()) if isinstance(one, LazyLogits) else one
            for one in self._operands
        ]
        return self._function(*operands, **self._kwargs)

    def _derive(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that has a rule, which is found by its name."""
        lazy = [one for one in (self, *args) if isinstance(one, LazyLogits)]
        if not any(one.is_materialized for one in lazy):
            sums = tuple(one._logits if isinstance(one, LazyLogits) else one for one in args)
            found = _lazy_operations.apply(name, self._logits, sums, kwargs)
            if isinstance(found, Tensor):
                if not torch.compiler.is_compiling():
                    self._record.losses += 1
                return found
            if found is not None and (torch.is_grad_enabled() or not any(one.requires_grad for one in lazy)):
                if found is self._logits:
                    return self
                is_view = isinstance(found, LogitSum) and name in VIEWS and found.layers is self._sum.layers
                return LazyLogits(found, function, (self, *args), kwargs, self._record, is_view)
        args, kwargs = map_nested(lambda one: materialized(one, name), ((self, *args), kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits):
            if function in NAMES:
                return first._derive(NAMES[function], function, args[1:], kwargs)
            if function.__name__ in _METADATA:
                return getattr(first, function.__name__)(*args[1:], **kwargs)
        if function in (torch.autograd.grad, torch.autograd.backward):
            inputs = kwargs.get("inputs", args[1:2] if function is torch.autograd.grad else None)
            if any(isinstance(one, LazyLogits) for one in leaves(inputs)):
                raise _no_gradient(f"torch.autograd.{function.__name__}")
        why = _lazy_operations.name_of(function)
        args, kwargs = map_nested(lambda one: materialized(one, why), (args, kwargs))
        return function(*args, **kwargs)

    @property
    def _sum(self) -> LogitSum:
        return self._logits.logits if isinstance(self._logits, LogProbabilities) else self._logits

    @property
    def _like(self) -> Tensor:
        return self._sum.probe() if self._tensor is None else self._tensor

    @property
    def shape(self) -> torch.Size:
        """The shape, as of a tensor."""
        return self._like.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype, as of a tensor."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """The device, as of a tensor."""
        return self._sum.device

    @property
    def data(self) -> Tensor:
        """The materialized logits, as of a tensor."""
        return self.materialize("data").data

    @property
    def requires_grad(self) -> bool:
        """Whether the logits depend on a tensor that requires a gradient, as of a tensor."""
        return self._sum.requires_grad if self._tensor is None else self._tensor.requires_grad

    @property
    def is_leaf(self) -> bool:
        """Whether there is no graph, as of a tensor."""
        return not self.requires_grad

    @property
    def grad(self) -> None:
        """None, because lazy logits have no gradient."""
        return None

    def __getattr__(self, name: str) -> Any:
        if name in _METADATA:
            return getattr(self._like, name)
        if name in _OF_DEVICE:
            return getattr(torch.empty(0, device=self.device), name)
        if name in _GRADIENTS:
            raise _no_gradient(name)
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.materialize(name), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize("pickle").__reduce_ex__(protocol)

    def __len__(self) -> int:
        return len(self._like)

    def __iter__(self) -> Iterator[Any]:
        # The ModelOutput of transformers takes the first row of a first field that is no tensor, to look at its class.
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return self._derive("__getitem__", Tensor.__getitem__, (index,), {})

    def __repr__(self) -> str:
        if self._tensor is not None:
            return repr(self._tensor)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    __hash__ = object.__hash__


def materialized(value: Any, why: str = "materialize") -> Any:
    """Materialize lazy logits; other values are returned unchanged."""
    return value.materialize(why) if isinstance(value, LazyLogits) else value


def _bare(operation: str) -> str:
    return operation.strip("_") if operation.startswith("__") else operation


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, version_of(tensor)


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; autograd does not compare the version of what hooks return."""
    tensor, version = saved
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for the gradient of the logits has been modified by an inplace operation"
        )
    return tensor


def _no_gradient(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: the loss of this model is computed without its logits, so they have no gradient and take no hooks;"
        " call unpatch_model"
    )


def _derived(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def call(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        return self._derive(name, function, args, kwargs)

    return call


def _computed(name: str, why: str) -> Callable[..., Any]:
    def call(self: LazyLogits, *operands: Any, **kwargs: Any) -> Any:
        first, *others = [materialized(one, why) for one in (self, *operands)]
        return getattr(first, name)(*others, **kwargs)

    return call


# Python looks up special methods on the class, without __getattr__.
for _name in METHODS - {"__getitem__"}:
    setattr(LazyLogits, _name, _derived(_name))
for _name in (
    "sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul pos abs invert and rand or ror xor rxor"
    " lshift rlshift rshift rrshift lt le eq ne gt ge setitem reversed contains bool int float complex index array"
    " dlpack dlpack_device"
).split():
    setattr(LazyLogits, f"__{_name}__", _computed(f"__{_name}__", _name))
for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(LazyLogits, f"__i{_name}__", _computed(f"__i{_name}__", f"{_name}_"))
