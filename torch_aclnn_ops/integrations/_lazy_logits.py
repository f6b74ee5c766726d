"""Lazy logits: the tensors that the head of a patched model returns in training."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch_aclnn_ops._nested import leaves, map_nested
from torch_aclnn_ops._numerics import is_autocast_on
from torch_aclnn_ops._torch_compat.lazy_tensors import (
    is_mutable,
    make_wrapper,
    node_class,
    outside_of_dynamo,
    without_torch_function,
)
from torch_aclnn_ops._torch_compat.optimizer import version_of
from torch_aclnn_ops.integrations import _lazy_operations
from torch_aclnn_ops.integrations._lazy_operations import GRADIENTS, NAMES, READS, VIEWS, name_of
from torch_aclnn_ops.integrations._recipes import Lazy, Recipe

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

_cross_entropy = torch.nn.functional.cross_entropy
_NOT_LAZY = object()


class _MakeLazy(Function):
    """Adds lazy logits to the graph; the backward pass differentiates the function that computes them."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *operands: Tensor) -> Any:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        return LazyLogits(recipe)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return (None,) * (1 + len(ctx.recipe.operands))
        return None, *ctx.recipe.vjp(gradients[0])


def _watching(name: str) -> Callable[..., Any]:
    def register(node: Any, *args: Any, **kwargs: Any) -> Any:
        node.recipe.is_watched = True
        return getattr(BackwardCFunction, name)(node, *args, **kwargs)

    return register


# Hooks of the node ``logits.grad_fn``.
for _name in ("register_hook", "register_prehook"):
    setattr(node_class(_MakeLazy), _name, _watching(_name))


class _Materialize(Function):
    """Materializes lazy logits."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Tensor], logits: Tensor) -> Tensor:
        return compute().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class _Loss(Function):
    """A loss that was computed without logits; computes their gradient from materialized logits if it is needed."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, from_logits: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.logits, ctx.from_logits = logits, from_logits
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, [gradient] = ctx.logits, gradients
        if not logits.is_watched:
            return gradient, None, None
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            real = logits.materialize() if create_graph else logits.recipe.computed()[1].detach().requires_grad_()
            loss = ctx.from_logits(real)
            [found] = torch.autograd.grad(loss, real, gradient, create_graph=create_graph)
        return None, found, None


class LazyLogits(Lazy, Tensor):
    """A tensor subclass without storage, which materializes the logits when an operation needs them.

    The logits are materialized at most once. Operations whose result is a ``LogitSum`` (multiplication by a number,
    sums, ``torch.tanh``, casts, views of rows) are deferred, and cross entropy is computed without logits.

    Lazy logits are part of the graph, but the loss passes gradients directly to the head's operands. If a hook or a
    caller needs the gradient with respect to the logits, the backward pass materializes them and recomputes the loss.

    Args:
        recipe: how the logits are computed.
    """

    def __new__(cls, recipe: Recipe) -> "LazyLogits":
        """Create a tensor with the metadata of the logits."""
        like = recipe.logits.probe()
        self: LazyLogits = make_wrapper(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=0 if recipe.logits.layout is None else recipe.logits.layout.offset,
            dtype=recipe.logits.dtype,
            device=recipe.logits.device,
        )
        return self

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._tensor: Tensor | None = None
        self._version_of_tensor = 0
        self._node: Any = None

    @classmethod
    def of(cls, recipe: Recipe) -> "LazyLogits":
        """Create lazy logits that are part of the graph."""
        lazy: LazyLogits = _MakeLazy.apply(recipe, *recipe.operands)  # type: ignore[no-untyped-call]
        lazy._node = lazy._native("grad_fn")
        return lazy

    def _native(self, name: str) -> Any:
        with without_torch_function():
            return getattr(self, name)

    @property
    def is_materialized(self) -> bool:
        """Whether the logits, or a base of which they are a view, were materialized."""
        base = self.recipe.operands[0] if self.recipe.is_view else None
        return self._tensor is not None or (isinstance(base, LazyLogits) and base.is_materialized)

    @property
    def is_watched(self) -> bool:
        """Whether the gradient with respect to these logits, or to lazy operands of them, is needed."""
        return any(recipe.is_watched for recipe in self.recipe.history())

    def materialize(self, why: str = "materialize") -> Tensor:
        """Materialize the logits once, and return the same tensor in every call.

        Args:
            why: the operation that needs the logits.
        """
        if self._tensor is None:
            self.recipe.record.add(why)
            # Later uses may need a graph, even if the first one does not.
            with torch.inference_mode(False), torch.enable_grad():
                if self.recipe.is_view or self.recipe.in_module:
                    self._tensor = self.recipe.call([materialized(one) for one in self.recipe.operands])
                else:
                    self._tensor = _Materialize.apply(  # type: ignore[no-untyped-call]
                        lambda: self.recipe.computed()[1], self
                    )
            self._version_of_tensor = version_of(self._tensor)
        return self._tensor

    @property
    def _was_written_to(self) -> bool:
        return self._tensor is not None and version_of(self._tensor) != self._version_of_tensor

    def derive(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "LazyLogits | None":
        """Return the lazy result of an operation, or None if the operation needs the logits."""
        sums = map_nested(lambda one: one.recipe.logits if isinstance(one, LazyLogits) else one, (args, kwargs))
        lazy = [one for one in (self, *leaves((args, kwargs))) if isinstance(one, LazyLogits)]
        if not all(one.is_ours for one in lazy) or len({one._native("requires_grad") for one in lazy}) > 1:
            return None
        logits = _lazy_operations.defer(name, self.recipe.logits, *sums)
        if logits is None or logits is self.recipe.logits:
            return None if logits is None else self
        is_view = name in VIEWS
        in_module = any(recipe.in_module for recipe in self.recipe.history())
        function = getattr(Tensor, name)
        return LazyLogits.of(
            Recipe(logits, function, (self, *args), kwargs, self.recipe.record, is_view=is_view, in_module=in_module)
        )

    @property
    def is_ours(self) -> bool:
        """Whether the logits are not materialized, and no ``autograd.Function`` has replaced their node."""
        return not self.is_materialized and self._native("grad_fn") is self._node

    def cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Compute the loss without logits, or return None if it needs them."""
        if not self.is_ours or self.is_watched:
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._native("requires_grad")):
            loss = _lazy_operations.cross_entropy(self.recipe.logits, *args, **kwargs)
            if loss is None:
                return None
            for recipe in self.recipe.history():
                recipe.is_in_loss = True
            self.recipe.record.losses += 1
            if not loss.requires_grad:
                return loss
            return _Loss.apply(loss, self, _with_current_autocast(args, kwargs))  # type: ignore[no-untyped-call,no-any-return]

    def watch(self, name: str) -> Tensor:
        """Return the tensor that receives the gradient of the logits, and make the backward pass compute it."""
        if self._was_written_to:
            return self.materialize()
        if not (self.recipe.is_view or self.recipe.in_module):
            self.recipe.is_watched = True
            return self
        if self.recipe.is_in_loss:
            raise RuntimeError(
                f"{name}: the loss of this model was computed without these logits, so they have no gradient; call"
                " unpatch_model, or register the hook in a forward hook of the model's head, before the loss"
            )
        return self.materialize(name)

    @property
    def _metadata_tensor(self) -> Tensor:
        """The tensor that has the metadata and the gradient of the logits."""
        return self.materialize() if self.is_materialized and (self.recipe.is_view or self._was_written_to) else self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo also compiles what is called after a graph break, and takes some results for the logits themselves.
        call = _call_outside_of_dynamo if torch.compiler.is_compiling() else _call
        return call(function, args, kwargs or {})

    @property
    def _view_base(self) -> Tensor | None:
        """The base of a view, as ``Tensor._base``."""
        if not self.recipe.is_view:
            return None
        base = self.recipe.operands[0]
        inner = base._view_base if isinstance(base, LazyLogits) else None
        return base if inner is None else inner

    def _try_lazy(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that does not need the logits, or ``_NOT_LAZY``."""
        if function in NAMES:
            derived = self.derive(NAMES[function], args, kwargs)
            return _NOT_LAZY if derived is None else derived
        if function is _cross_entropy:
            loss = self.cross_entropy(*args, **kwargs)
            return _NOT_LAZY if loss is None else loss
        if name_of(function) == "_base":
            return self._view_base
        if function is Tensor.register_hook and _is_of_torch_distributed(*args, **kwargs):
            # The hook waits for the backward pass, and does not change the gradient.
            if self.recipe.in_module:
                return RemovableHandle(OrderedDict())
            with without_torch_function():
                return self._metadata_tensor.register_hook(*args, **kwargs)
        return _NOT_LAZY

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator below autograd on the computed logits."""
        if is_mutable(function):
            raise RuntimeError(
                f"{function} would modify lazy logits in-place below autograd, where that cannot be recorded; modify"
                " logits.clone(), or call unpatch_model"
            )
        args, kwargs = map_nested(
            lambda one: one.compute_detached() if isinstance(one, LazyLogits) else one, (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def compute_detached(self) -> Tensor:
        """Return the logits without a graph."""
        return self.recipe.compute_detached() if self._tensor is None else self._tensor.detach()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.is_materialized:
            return repr(self.materialize())
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    first = args[0] if args else None
    if isinstance(first, LazyLogits):
        if name_of(function) == "detach_":
            raise RuntimeError("lazy logits cannot be detached in-place; use logits.detach(), or unpatch_model")
        result = first._try_lazy(function, args[1:], kwargs)
        if result is not _NOT_LAZY:
            return result
    name, is_native = name_of(function), True
    take: Callable[[LazyLogits], Tensor]
    is_cast = function is Tensor.type and len(args) + len(kwargs) > 1
    if function in READS and not is_cast:
        take = lambda lazy: lazy._metadata_tensor  # noqa: E731
    elif function in GRADIENTS:
        take = lambda lazy: lazy.watch(name)  # noqa: E731
    else:
        take, is_native = (lambda lazy: lazy.materialize(name)), False
    args, kwargs = map_nested(lambda one: take(one) if isinstance(one, LazyLogits) else one, (args, kwargs))
    with without_torch_function() if is_native else nullcontext():
        result = function(*args, **kwargs)
    # Functions that return their argument return the lazy logits.
    return first if isinstance(first, LazyLogits) and result is args[0] else result


_call_outside_of_dynamo = outside_of_dynamo(_call)


def materialized(value: Any) -> Any:
    """Materialize lazy logits; other values are returned unchanged."""
    return value.materialize() if isinstance(value, LazyLogits) else value


def _is_of_torch_distributed(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def _with_current_autocast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the cross entropy of logits in the current autocast state."""
    device = args[0].device if args else kwargs["target"].device
    is_on = is_autocast_on(torch.empty(0, device=device))
    dtype = torch.get_autocast_dtype(device.type) if is_on else None

    def from_logits(logits: Tensor) -> Tensor:
        same = is_on == is_autocast_on(logits)
        with nullcontext() if same else torch.autocast(device.type, dtype, enabled=is_on):
            return _cross_entropy(logits, *args, **kwargs)

    return from_logits
