"""The inputs of the linear cross entropy kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops._head import tiling
from torch_aclnn_ops.ops._head.kept_rows import KeptRows
from torch_aclnn_ops.ops._head.products import has_bfloat16_units
from torch_aclnn_ops.ops._head.tiling import LogitOptions, Sizes, Tiling
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Statistics

import torch
from torch import Tensor


@dataclass(frozen=True)
class RequestedOutputs:
    """The requested outputs of a call: statistics beyond the first three, and gradients."""

    weighted: bool = False  # weighted sum of each row's logits, for label smoothing
    entropy: bool = False  # entropy of each row
    predicted_tokens: bool = False  # class of each row's largest logit
    gradients: tuple[bool, bool, bool] = (False, False, False)  # of input, linear_weight and linear_bias

    @property
    def differentiable(self) -> int:
        """The number of differentiable statistics."""
        return 2 + self.weighted + self.entropy

    @property
    def numbers_per_part(self) -> int:
        """How many numbers per row are kept for each part of the vocabulary: statistics, a stack of them, and sums."""
        return 2 * (2 + self.differentiable + 2 * self.predicted_tokens) + 4

    def name(self, results: Sequence[Any]) -> Statistics:
        """Convert a sequence of the requested results to :class:`Statistics`."""
        return Statistics(*scatter((True, True, True, self.weighted, self.entropy, self.predicted_tokens), results))


class Inputs(NamedTuple):
    """The arguments of a call, the same for all its kernels."""

    input: Tensor  # shape (N, H)
    linear_weight: Tensor  # shape (V, H)
    linear_bias: Tensor | None  # shape (V,)
    target: Tensor  # class indices, ``IGNORED`` or ``ELSEWHERE``, shape (N,), or probabilities, shape (N, V)
    class_weight: Tensor | None  # shape (V,)
    options: LogitOptions  # options of the logits and their chunks
    requested: RequestedOutputs = RequestedOutputs()

    def tile_statistics(self, classes: int | None = None) -> Tiling:
        """Choose chunks of rows and classes if only statistics are needed; raises as :meth:`tile_rows` does."""
        return tiling.tile_statistics(
            self._sizes(classes), self.options, self._copies(), self.requested.numbers_per_part
        )

    def tile_rows(self, classes: int | None = None) -> Tiling:
        """Choose chunks of full rows, for gradients; raise ``ValueError`` if ``max_memory`` is too small.

        ``classes`` replaces the number of classes of the head.
        """
        weight, needs_weight_gradient = self.linear_weight, self.requested.gradients[1]
        units = weight.dtype == torch.bfloat16 and has_bfloat16_units(weight)
        has_numbers = type(self.input.shape[0]) is int and not torch.compiler.is_compiling()
        tile_rows = tiling.tile_rows_cached if has_numbers else tiling.tile_rows
        return tile_rows(self._sizes(classes), self.options, self._copies(), needs_weight_gradient, units)

    def blocks(self, rows: slice, logits: Tensor) -> list[slice]:
        """Split the rows of a chunk into those that are reduced at once: all on a device, to launch fewer kernels."""
        size = tiling.rows_of_block(logits.shape[1], logits.element_size()) if logits.is_cpu else rows.stop
        return tiling.slices(rows.start, rows.stop, max(size, 1)) or [rows]

    def empty_statistics(self) -> list[Tensor]:
        """Return uninitialized tensors of the requested statistics, for fake tensors."""
        floats = [accumulation_dtype(self.input.dtype)] * (1 + self.requested.differentiable)
        dtypes = [*floats, *[torch.int64] * self.requested.predicted_tokens]
        return [self.input.new_empty(self.input.shape[0], dtype=dtype) for dtype in dtypes]

    def empty_gradients(self, like: Tensor) -> list[Tensor | None]:
        """Return uninitialized tensors of the requested gradients, which are fake if ``like`` is."""
        tensors = (self.input, self.linear_weight, self.linear_bias)
        return [
            like.new_empty(tensor.shape, dtype=tensor.dtype) if is_needed and tensor is not None else None
            for tensor, is_needed in zip(tensors, self.requested.gradients, strict=True)
        ]

    def _sizes(self, classes: int | None) -> Sizes:
        weight = self.linear_weight
        classes = weight.shape[0] if classes is None else classes
        return Sizes(self.input.shape[0], classes, weight.shape[-1], weight.dtype, weight.is_cpu)

    def _copies(self) -> int:
        """Return the number of tensors of the logits' size that are alive at the same time."""
        return 1 + (self.options.softcap is not None) + self.requested.entropy + 2 * self.target.is_floating_point()


def kept_rows(inputs: Inputs) -> tuple[KeptRows, Inputs]:
    """Return which rows are not ignored, and the inputs without the others."""
    target = None if inputs.target.is_floating_point() else inputs.target
    kept = KeptRows(target, inputs.input.shape[0])
    if kept.are_all:
        return kept, inputs
    if kept.are_dropped:
        return kept, inputs._replace(input=kept.select(inputs.input), target=kept.select(inputs.target))
    return kept, inputs._replace(input=kept.select(inputs.input))
