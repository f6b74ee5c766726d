"""What the kernels of a linear cross entropy are given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops.ops._head import tiling
from torch_aclnn_ops.ops._head.kept_rows import KeptRows
from torch_aclnn_ops.ops._head.products import has_bfloat16_units
from torch_aclnn_ops.ops._head.tiling import LogitOptions, Sizes, Tiling
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Statistics

import torch
from torch import Tensor


@dataclass(frozen=True)
class RequestedOutputs:
    """What a call asks for: statistics beyond the first three, and gradients."""

    weighted: bool = False  # the weighted sum of a row's logits, as for label smoothing
    entropy: bool = False  # the entropy
    predicted_tokens: bool = False  # the classes of the largest logits
    gradients: tuple[bool, bool, bool] = (False, False, False)  # those by input, linear_weight and linear_bias

    @property
    def differentiable(self) -> int:
        """The number of statistics that have derivatives."""
        return 2 + self.weighted + self.entropy

    def name(self, results: Sequence[Any]) -> Statistics:
        """Return the statistics by their names; ``results`` has those that are asked for."""
        return Statistics(*scatter((True, True, True, self.weighted, self.entropy, self.predicted_tokens), results))


class Inputs(NamedTuple):
    """The arguments of a call, the same for all its kernels."""

    input: Tensor  # shape (N, H)
    linear_weight: Tensor  # shape (V, H)
    linear_bias: Tensor | None  # shape (V,)
    target: Tensor  # class indices, ``IGNORED`` or ``ELSEWHERE``, shape (N,), or probabilities, shape (N, V)
    class_weight: Tensor | None  # shape (V,)
    options: LogitOptions  # what shapes the logits and their chunks
    requested: RequestedOutputs = RequestedOutputs()  # what is asked for

    @property
    def is_plain(self) -> bool:
        """Whether the logits are the products, but for the temperature, and the targets are classes."""
        return self.linear_bias is None and self.options.softcap is None and not self.target.is_floating_point()

    def tile_statistics(self) -> Tiling:
        """Cut rows and classes where only statistics are made."""
        return tiling.tile_statistics(self._sizes(), self.options, self._copies())

    def tile_rows(self) -> Tiling:
        """Cut the rows where the logits of a row are needed together, or refuse a ``max_memory`` that is too little."""
        weight, needs_weight_gradient = self.linear_weight, self.requested.gradients[1]
        units = weight.dtype == torch.bfloat16 and has_bfloat16_units(weight)
        has_numbers = type(self.input.shape[0]) is int and not torch.compiler.is_compiling()
        cut = tiling.tile_rows_once if has_numbers else tiling.tile_rows
        return cut(self._sizes(), self.options, self._copies(), needs_weight_gradient, units)

    def _sizes(self) -> Sizes:
        weight = self.linear_weight
        return Sizes(self.input.shape[0], weight.shape[0], weight.shape[1], weight.dtype, weight.is_cpu)

    def _copies(self) -> int:
        """Return how many tensors of the logits' size are held beside each other."""
        return 1 + (self.options.softcap is not None) + self.requested.entropy + 2 * self.target.is_floating_point()


class PlainLoss(NamedTuple):
    """A scalar loss that is the cross entropies of the rows, or their mean; class indices are the caller's."""

    reduction: str
    ignore_index: int


def kept_rows(inputs: Inputs) -> tuple[KeptRows, Inputs]:
    """Return which rows are not ignored, and the inputs without the others."""
    target = None if inputs.target.is_floating_point() else inputs.target
    kept = KeptRows(target, inputs.input.shape[0])
    if kept.are_all:
        return kept, inputs
    if kept.are_dropped:
        return kept, inputs._replace(input=kept.select(inputs.input), target=kept.select(inputs.target))
    return kept, inputs._replace(input=kept.select(inputs.input))
