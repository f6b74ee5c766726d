"""How lazy logits are made, and the gradients of what they are made of."""

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
    """What has a recipe instead of numbers."""

    recipe: "Recipe"

    def materialize(self) -> Tensor:
        """Return the numbers."""
        raise NotImplementedError


class Recipe:
    """How logits are made: a function, its arguments, and what a loss has to know of its result.

    Args:
        logits: for the loss.
        function: computes the logits.
        args: its arguments; some are tensors, maybe lazy.
        kwargs: the others.
        is_view: whether the result has its elements in those of the first argument.
        in_module: whether the function calls a module for its weights, which has the derivatives then.
        record: where it is written down that the logits were computed.
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
        self.is_watched = False  # somebody wants the gradient of these logits
        self.is_in_loss = False  # a loss was computed without them
        self._version = 0
        self._computed: tuple[list[Tensor], Tensor] | None = None

    def history(self) -> "Iterator[Recipe]":
        """Yield this and what it is made of."""
        yield self
        for parent in self.parents:
            yield from parent.history()

    def call(self, operands: list[Tensor]) -> Tensor:
        """Compute the logits of other operands, as if autocast was what it was."""
        given = iter(operands)
        args, kwargs = map_nested(lambda one: next(given) if isinstance(one, Tensor) else one, (self.args, self.kwargs))
        return self.function(*args, **kwargs)

    def numbers(self) -> Tensor:
        """Compute the logits, without derivatives."""
        with torch.no_grad():
            return self.call([one.recipe.numbers() if isinstance(one, Lazy) else one for one in self.operands])

    def computed(self) -> tuple[list[Tensor], Tensor]:
        """Return the logits and the detached operands by which they can be differentiated."""
        if self._computed is None or version_of(self._computed[1]) != self._version:
            # What is saved here is not the caller's: torch.utils.checkpoint counts what its function saves.
            with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
                detached = [
                    (one.recipe.numbers() if isinstance(one, Lazy) else one)
                    .detach()
                    .requires_grad_(one.is_floating_point() and one.requires_grad)
                    for one in self.operands
                ]
                self._computed = detached, self.call(detached)
                self._version = version_of(self._computed[1])
        return self._computed

    def pull_back(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the operands."""
        if self.in_module:
            raise RuntimeError(
                "the head is sharded by fully_shard, which has no gradients of logits that were computed behind its"
                " back; call unpatch_model"
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
