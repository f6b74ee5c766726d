"""How lazy logits are computed and differentiated."""

from collections.abc import Callable, Iterator
from typing import Any

from torch_aclnn_ops._nested import leaves, map_nested
from torch_aclnn_ops._torch_compat.optimizer import version_of
from torch_aclnn_ops.integrations._logit_sums import LogitSum
from torch_aclnn_ops.integrations._materializations import Materializations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Lazy:
    """Base class of tensors with a recipe instead of a storage."""

    recipe: "Recipe"

    def materialize(self) -> Tensor:
        """Return the computed tensor."""
        raise NotImplementedError


class Recipe:
    """A deferred operation: a function, its arguments, and its result as a ``LogitSum``.

    Args:
        logits: the result, from which a loss is computed.
        function: computes the logits.
        args: its positional arguments; tensors among them may be lazy.
        kwargs: its keyword arguments.
        is_view: whether the result is a view of the first argument.
        in_module: whether the function calls a module, which unshards its weights and records the graph.
        record: counts materializations.
    """

    def __init__(
        self,
        logits: LogitSum,
        function: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Materializations,
        is_view: bool = False,
        in_module: bool = False,
    ) -> None:
        self.logits, self.function, self.args, self.kwargs = logits, function, args, kwargs
        self.is_view, self.in_module, self.record = is_view, in_module, record
        self.operands: list[Tensor] = [one for one in leaves((args, kwargs)) if isinstance(one, Tensor)]
        self.parents: list[Recipe] = [one.recipe for one in self.operands if isinstance(one, Lazy)]
        self.is_watched = False  # whether the gradient with respect to the logits is needed
        self.is_in_loss = False  # whether a loss was computed without them
        self._version = 0
        self._computed: tuple[list[Tensor], Tensor] | None = None

    def history(self) -> "Iterator[Recipe]":
        """Yield this recipe and those of its operands, recursively."""
        yield self
        for parent in self.parents:
            yield from parent.history()

    def call(self, operands: list[Tensor]) -> Tensor:
        """Call the function on other operands."""
        given = iter(operands)
        args, kwargs = map_nested(lambda one: next(given) if isinstance(one, Tensor) else one, (self.args, self.kwargs))
        return self.function(*args, **kwargs)

    def compute_detached(self) -> Tensor:
        """Compute the logits without recording a graph."""
        with torch.no_grad():
            return self.call([one.recipe.compute_detached() if isinstance(one, Lazy) else one for one in self.operands])

    def computed(self) -> tuple[list[Tensor], Tensor]:
        """Return detached operands, and the logits that were computed from them with a graph."""
        if self._computed is None or version_of(self._computed[1]) != self._version:
            # Bypass the hooks of torch.utils.checkpoint, which counts the tensors that are saved in its function.
            with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
                detached = [
                    (one.recipe.compute_detached() if isinstance(one, Lazy) else one)
                    .detach()
                    .requires_grad_(one.is_floating_point() and one.requires_grad)
                    for one in self.operands
                ]
                self._computed = detached, self.call(detached)
                self._version = version_of(self._computed[1])
        return self._computed

    def vjp(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients with respect to the operands."""
        if self.in_module:
            raise RuntimeError(
                "the head is sharded by fully_shard, so logits that are materialized outside of its forward pass have"
                " no gradient; call unpatch_model"
            )
        create_graph = torch.is_grad_enabled()
        if create_graph:
            operands = [one.materialize() if isinstance(one, Lazy) else one for one in self.operands]
            result = self.call(operands)
        else:
            operands, result = self.computed()
        wanted = [one for one in operands if one.requires_grad]
        found = iter(
            torch.autograd.grad(result, wanted, gradient, retain_graph=True, create_graph=create_graph)
            if wanted
            else ()
        )
        return [next(found) if one.requires_grad else None for one in operands]


def _itself(tensor: Tensor) -> Tensor:
    return tensor
