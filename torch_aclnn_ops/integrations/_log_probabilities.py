"""Lazy log-probabilities: the log-softmax of lazy logits, of which losses take one class or the sum of all."""

from typing import NamedTuple

from torch_aclnn_ops.integrations._head_layers import Layer
from torch_aclnn_ops.integrations._logit_sums import LogitSum

import torch
from torch import Tensor


class LogProbabilities(NamedTuple):
    """The log-softmax over the classes of contiguous logits, times ``sign``."""

    logits: LogitSum
    sign: int = 1

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the logits."""
        return self.logits.layers

    @property
    def device(self) -> torch.device:
        """The logits' device."""
        return self.logits.device

    @property
    def requires_grad(self) -> bool:
        """Whether the logits depend on a tensor that requires a gradient."""
        return self.logits.requires_grad

    def probe(self) -> Tensor:
        """Return a meta tensor with the dtype, shape and strides of the log-probabilities."""
        return self.logits.probe()

    def negated(self) -> "LogProbabilities":
        """Return the negative log-probabilities."""
        return LogProbabilities(self.logits, -self.sign)

    def gathered(self, dim: int, index: Tensor) -> Tensor | None:
        """Return what ``gather`` does, if it takes one class of each row."""
        rows = (*self.logits.shape[:-1], 1)
        if not self._is_last(dim) or index.dtype != torch.int64 or index.shape != rows:
            return None
        # No index is ignored: this one is out of range for gather too.
        return self._loss(index.reshape(-1), index.shape, ignore_index=torch.iinfo(torch.int64).min)

    def summed(self, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the sum over the classes."""
        if not self._is_last(dim) or not (dtype is None or dtype.is_floating_point):
            return None
        sizes = self.logits.shape[:-1]
        target = torch.zeros(torch.Size(sizes).numel(), dtype=torch.int64, device=self.device)
        # Smoothed by 1, the loss is the mean of all classes.
        mean = self._loss(target, (*sizes, 1) if keepdim else sizes, label_smoothing=1.0)
        return None if mean is None else (mean * self.logits.classes).to(dtype or mean.dtype)

    def nll_loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
    ) -> Tensor | None:
        """Return what ``nll_loss`` does of rows: the cross entropy, if the sign is 1."""
        if self.sign != 1 or len(self.logits.shape) != 2 or size_average is not None or reduce is not None:
            return None
        return self.logits.cross_entropy(target, weight=weight, ignore_index=ignore_index, reduction=reduction)

    def _is_last(self, dim: int) -> bool:
        return type(dim) is int and dim in (-1, len(self.logits.shape) - 1)

    def _loss(self, target: Tensor, sizes: tuple[int, ...], **options: int | float) -> Tensor | None:
        rows = self.logits.viewed(self.logits.probe().view(-1, self.logits.classes))
        loss = rows.cross_entropy(target, reduction="none", **options)
        return None if loss is None else (-self.sign * loss).to(self.logits.dtype).reshape(sizes)


def log_probabilities(
    logits: LogitSum, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> LogProbabilities | None:
    """Return the log-softmax of logits; None if it is not over the classes of whole rows."""
    if type(dim) is not int or dim not in (-1, len(logits.shape) - 1) or len(logits.shape) < 2:
        return None
    # Autocast decides by the device.
    dtype = dtype or torch.empty(0, 1, dtype=logits.dtype, device=logits.device).log_softmax(-1).dtype
    rows = logits.contiguous_rows() if dtype.is_floating_point else None
    rows = rows and rows.cast(dtype)
    return None if rows is None else LogProbabilities(rows)
