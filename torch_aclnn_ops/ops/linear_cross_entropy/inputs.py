"""The inputs of the linear cross entropy kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops.ops.linear_cross_entropy import tiling
from torch_aclnn_ops.ops.linear_cross_entropy.products import has_bfloat16_units
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import IGNORED, Statistics
from torch_aclnn_ops.ops.linear_cross_entropy.tiling import LogitOptions, Sizes, Tiling

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

    @property
    def is_plain(self) -> bool:
        """Whether there is no bias, no softcap, and the targets are class indices."""
        return self.linear_bias is None and self.options.softcap is None and not self.target.is_floating_point()

    def tile_statistics(self) -> Tiling:
        """Choose chunks of rows and classes if only statistics are needed."""
        return tiling.tile_statistics(self._sizes(), self.options, self._copies())

    def tile_rows(self) -> Tiling:
        """Choose chunks of full rows, for gradients; raise ``ValueError`` if ``max_memory`` is too small."""
        weight, needs_weight_gradient = self.linear_weight, self.requested.gradients[1]
        units = weight.dtype == torch.bfloat16 and has_bfloat16_units(weight)
        has_numbers = type(self.input.shape[0]) is int and not torch.compiler.is_compiling()
        tile_rows = tiling.tile_rows_cached if has_numbers else tiling.tile_rows
        return tile_rows(self._sizes(), self.options, self._copies(), needs_weight_gradient, units)

    def _sizes(self) -> Sizes:
        weight = self.linear_weight
        return Sizes(self.input.shape[0], weight.shape[0], weight.shape[1], weight.dtype, weight.is_cpu)

    def _copies(self) -> int:
        """Return the number of tensors of the logits' size that are alive at the same time."""
        return 1 + (self.options.softcap is not None) + self.requested.entropy + 2 * self.target.is_floating_point()


class PlainLoss(NamedTuple):
    """A scalar cross entropy without further options; class indices are the caller's."""

    reduction: str
    ignore_index: int


class KeptRows:
    """Inputs without their ignored rows.

    Ignored rows are dropped if finding them does not synchronize with a device. Otherwise they are set to zeros with
    coefficients of 0, so that inf and nan in them do not propagate.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._rows = inputs.input.shape[0]
        self._kept: Tensor | None = None
        self._ignored: Tensor | None = None
        target = inputs.target
        if target.is_floating_point():
            return
        if not values_are_readable(target):
            self._ignored = target == IGNORED
            self.inputs = inputs._replace(input=inputs.input.masked_fill(self._ignored.unsqueeze(1), 0))
        elif self._rows > 0 and int(target.min()) < 0:
            kept = (target != IGNORED).nonzero().squeeze(1)
            if kept.shape[0] < self._rows:
                self._kept = kept
                self.inputs = inputs._replace(input=inputs.input[kept], target=target[kept])

    def select(self, values: Tensor | None) -> Tensor | None:
        """Select the values of the kept rows; those of ignored rows that are not dropped become zeros."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored, 0)
        return values if self._kept is None else values[self._kept]

    def expand_to_all_rows(self, values: Tensor | None, elsewhere: int = 0) -> Tensor | None:
        """Expand values of the kept rows to all rows, with ``elsewhere`` for ignored rows."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored.reshape(-1, *(1,) * (values.dim() - 1)), elsewhere)
        if self._kept is None:
            return values
        return values.new_full((self._rows, *values.shape[1:]), elsewhere).index_copy_(0, self._kept, values)
