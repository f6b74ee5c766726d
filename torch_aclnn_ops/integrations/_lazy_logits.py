"""Logits that nobody has computed: the tensors that the head of a patched model returns in training."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch_aclnn_ops._nested import leaves, map_nested
from torch_aclnn_ops._numerics import is_autocast_on
from torch_aclnn_ops._torch_compat.lazy_tensors import is_mutable, make_wrapper, node_class, without_torch_function
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
_NOT = object()


class _Make(Function):
    """Makes lazy logits a node of the graph, whose gradients are those of the function that computes them."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *operands: Tensor) -> Any:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        return LazyLogits(recipe)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return (None,) * (1 + len(ctx.recipe.operands))
        return None, *ctx.recipe.pull_back(gradients[0])


def _watching(name: str) -> Callable[..., Any]:
    def register(node: Any, *args: Any, **kwargs: Any) -> Any:
        node.recipe.is_watched = True
        return getattr(BackwardCFunction, name)(node, *args, **kwargs)

    return register


# A hook of the node, which ``logits.grad_fn`` is.
for _name in ("register_hook", "register_prehook"):
    setattr(node_class(_Make), _name, _watching(_name))


class _Materialize(Function):
    """Returns the numbers of lazy logits."""

    @staticmethod
    def forward(ctx: Any, numbers: Callable[[], Tensor], logits: Tensor) -> Tensor:
        return numbers().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class _Loss(Function):
    """A loss that was computed without logits; where their gradient is wanted, it is that of a loss from them."""

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
    """Logits as the layers and rows that they are made of: a tensor without memory.

    Everything that torch does with it is done with the logits, which are computed then, always the same tensor. Put off
    are what leaves a ``LogitSum`` in place (factors, sums, ``torch.tanh``, casts, views of rows), and the cross
    entropy, which is computed without logits.

    It is a node of the graph. The loss knows the gradient of the node's operands, and none goes through the node,
    unless a hook or somebody else wants it: then the backward pass computes the logits and the loss from them.

    Args:
        recipe: how it is computed.
    """

    def __new__(cls, recipe: Recipe) -> "LazyLogits":
        """Make a tensor of the shape and strides of the logits."""
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
        """Make lazy logits that are a node of the graph."""
        lazy: LazyLogits = _Make.apply(recipe, *recipe.operands)  # type: ignore[no-untyped-call]
        lazy._node = lazy._native("grad_fn")
        return lazy

    def _native(self, name: str) -> Any:
        with without_torch_function():
            return getattr(self, name)

    @property
    def is_computed(self) -> bool:
        """Whether there is a tensor, which others may have written to."""
        base = self.recipe.operands[0] if self.recipe.is_view else None
        return self._tensor is not None or (isinstance(base, LazyLogits) and base.is_computed)

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants the gradient of these logits, or of some that they are made of."""
        return any(recipe.is_watched for recipe in self.recipe.history())

    def materialize(self, why: str = "materialize") -> Tensor:
        """Return the logits, always the same tensor.

        Args:
            why: the operation that needs them.
        """
        if self._tensor is None:
            self.recipe.record.add(why)
            # Whoever reads them first may not want derivatives, and the next one may.
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
        """Return the lazy result of an operation, or None if it needs the logits."""
        sums = map_nested(lambda one: one.recipe.logits if isinstance(one, LazyLogits) else one, (args, kwargs))
        lazy = [one for one in (self, *leaves((args, kwargs))) if isinstance(one, LazyLogits)]
        if not all(one.is_ours for one in lazy) or len({one._native("requires_grad") for one in lazy}) > 1:
            return None
        logits = _lazy_operations.put_off(name, self.recipe.logits, *sums)
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
        """Whether nobody has computed the logits, or given them a gradient of his own by an ``autograd.Function``."""
        return not self.is_computed and self._native("grad_fn") is self._node

    def cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the loss without the logits, or None if it needs them."""
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
            return _Loss.apply(loss, self, _as_now(args, kwargs))  # type: ignore[no-untyped-call,no-any-return]

    def watch(self, name: str) -> Tensor:
        """Return the tensor whose gradients are those of the logits, after which the loss goes through it."""
        if self._was_written_to:
            return self.materialize()
        if not (self.recipe.is_view or self.recipe.in_module):
            self.recipe.is_watched = True
            return self
        if self.recipe.is_in_loss:
            raise RuntimeError(
                f"{name}: the loss of this model was computed without these logits, so it has no gradient for them;"
                " call unpatch_model, or register it in a forward hook of the model's head, before the loss"
            )
        return self.materialize(name)

    @property
    def _place(self) -> Tensor:
        """What has the logits' shape, strides and gradient."""
        return self.materialize() if self.is_computed and (self.recipe.is_view or self._was_written_to) else self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits):
            found = first._lazily(function, args[1:], kwargs)
            if found is not _NOT:
                return found
        name, is_native = name_of(function), True
        take: Callable[[LazyLogits], Tensor]
        if function in READS:
            take = lambda lazy: lazy._place  # noqa: E731
        elif function in GRADIENTS:
            take = lambda lazy: lazy.watch(name)  # noqa: E731
        else:
            take, is_native = (lambda lazy: lazy.materialize(name)), False
        args, kwargs = map_nested(lambda one: take(one) if isinstance(one, LazyLogits) else one, (args, kwargs))
        with without_torch_function() if is_native else nullcontext():
            result = function(*args, **kwargs)
        # What returns its argument does so here.
        return first if isinstance(first, LazyLogits) and result is args[0] else result

    @property
    def _viewed(self) -> Tensor | None:
        """What has the elements of which these are a view."""
        if not self.recipe.is_view:
            return None
        base = self.recipe.operands[0]
        inner = base._viewed if isinstance(base, LazyLogits) else None
        return base if inner is None else inner

    def _lazily(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of what leaves logits lazy, and ``_NOT`` of other functions."""
        if function in NAMES:
            derived = self.derive(NAMES[function], args, kwargs)
            return _NOT if derived is None else derived
        if function is _cross_entropy:
            loss = self.cross_entropy(*args, **kwargs)
            return _NOT if loss is None else loss
        if name_of(function) == "_base":
            return self._viewed
        if function is Tensor.register_hook and _is_of_torch_distributed(*args, **kwargs):
            # It waits for the backward pass, and leaves the gradient as it is.
            if self.recipe.in_module:
                return RemovableHandle(OrderedDict())
            with without_torch_function():
                return self._place.register_hook(*args, **kwargs)
        return _NOT

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute below autograd, which has recorded the operation: of functions in C++, and inside of others."""
        if is_mutable(function):
            raise RuntimeError(
                f"{function} would write to logits that nobody has computed, where that cannot be recorded; write to"
                " logits.clone(), or call unpatch_model"
            )
        args, kwargs = map_nested(
            lambda one: one.numbers() if isinstance(one, LazyLogits) else one, (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def numbers(self) -> Tensor:
        """Return the logits without derivatives."""
        return self.recipe.numbers() if self._tensor is None else self._tensor.detach()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.is_computed:
            return repr(self.materialize())
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def materialized(value: Any) -> Any:
    """Return the tensor that a value stands for, and other values as they are."""
    return value.materialize() if isinstance(value, LazyLogits) else value


def _is_of_torch_distributed(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def _as_now(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return a loss that is computed of logits later, in the autocast of now."""
    device = args[0].device if args else kwargs["target"].device
    is_on = is_autocast_on(torch.empty(0, device=device))
    dtype = torch.get_autocast_dtype(device.type) if is_on else None

    def from_logits(logits: Tensor) -> Tensor:
        same = is_on == is_autocast_on(logits)
        with nullcontext() if same else torch.autocast(device.type, dtype, enabled=is_on):
            return _cross_entropy(logits, *args, **kwargs)

    return from_logits
