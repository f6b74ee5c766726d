"""The inputs of the linear cross entropy kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops._head import tiling
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

    def name(self, results: Sequence[Any]) -> Statistics:
        """Convert a sequence of the requested results to :class:`Statistics`."""
        return Statistics(*scatter((True, True, True, self.weighted, self.entropy, self.predicted_tokens), results))


class Kernels(NamedTuple):
    """What computes a call.

    Attributes:
        why_not_fused: Why CANN's fused operators do not compute the statistics, or ``None`` if they do.
        fuses_gradients: Whether they compute the gradients if those of both input and weight are needed.
    """

    why_not_fused: str | None
    fuses_gradients: bool


class Inputs(NamedTuple):
    """The arguments of a call, the same for all its kernels."""

    input: Tensor  # shape (N, H)
    linear_weight: Tensor  # shape (V, H)
    linear_bias: Tensor | None  # shape (V,)
    target: Tensor  # class indices, ``IGNORED`` or ``ELSEWHERE``, shape (N,), or probabilities, shape (N, V)
    class_weight: Tensor | None  # shape (V,)
    options: LogitOptions  # options of the logits and their chunks
    requested: RequestedOutputs = RequestedOutputs()
    kernels: Kernels | None = None  # ``None`` in compiled code, which chooses them when it runs
    found: Statistics | None = None  # those of the forward pass, in the backward pass

    def tile_rows(self, rows: int | None = None, classes: int | None = None, with_gradients: bool = True) -> Tiling:
        """Choose chunks of rows; raise ``ValueError`` if ``max_memory`` is too small.

        Args:
            rows: Replaces the number of rows.
            classes: Replaces the number of classes of the head.
            with_gradients: Whether the gradients that are requested are computed too.
        """
        weight = self.linear_weight
        rows = self.input.shape[0] if rows is None else rows
        classes = weight.shape[0] if classes is None else classes
        sizes = Sizes(rows, classes, weight.shape[-1], weight.dtype, weight.is_cpu)
        units = weight.dtype == torch.bfloat16 and has_bfloat16_units(weight)
        tile_rows = tiling.tile_rows if torch.compiler.is_compiling() else tiling.tile_rows_cached
        with_gradient = with_gradients and self.requested.gradients[1]
        return tile_rows(sizes, self.options, self._copies(), with_gradient, units)

    def empty_statistics(self) -> list[Tensor]:
        """Return uninitialized tensors of the requested statistics, for fake tensors."""
        floats = [accumulation_dtype(self.input.dtype)] * (1 + self.requested.differentiable)
        dtypes = [*floats, *[torch.int64] * self.requested.predicted_tokens]
        return [self.input.new_empty(self.input.shape[0], dtype=dtype) for dtype in dtypes]

    def _copies(self) -> int:
        """Return the number of tensors of the logits' size that are alive at the same time."""
        return 1 + (self.options.softcap is not None) + self.requested.entropy + 2 * self.target.is_floating_point()
