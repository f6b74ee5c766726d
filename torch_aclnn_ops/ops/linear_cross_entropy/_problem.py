"""The arguments of the kernels of a linear cross entropy, and what they return."""

from dataclasses import dataclass
from typing import NamedTuple

from torch_aclnn_ops.ops.linear_cross_entropy import _cpu
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Options, Plan, plan_rows, plan_statistics

import torch
from torch import Tensor

# Targets that are no class of the head: of a row that does not count, and of a row whose class is in another part.
IGNORED = -1
ELSEWHERE = -2


class Statistics(NamedTuple):
    """What the logits ``z`` of each row are reduced to, shape (N,) each; ``max`` is a constant to derivatives.

    Attributes:
        logits_max: ``max z``.
        log_sum_exp: ``log sum exp(z - max)``.
        predicted: ``z[target] - max``, or ``sum(target * class_weight * (z - max))`` for probabilities.
        weighted: ``sum(class_weight * (z - max))``.
        entropy: of the softmax, in nats.
        predicted_tokens: the class of the largest logit.
    """

    logits_max: Tensor
    log_sum_exp: Tensor
    predicted: Tensor
    weighted: Tensor | None = None
    entropy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class Coefficients(NamedTuple):
    """The factors of each row's statistics in its loss, shape (N,) each; ``square`` belongs to the z-loss."""

    log_sum_exp: Tensor
    predicted: Tensor
    weighted: Tensor | None
    square: Tensor | None


def cross_entropies(statistics: Statistics, coefficients: Coefficients) -> Tensor:
    """Return the loss of every row without the z-loss.

    It is ``sum_v Q_v (log sum exp(z) - z_v)``, where Q is the weighted and smoothed target.
    """
    loss = coefficients.log_sum_exp * statistics.log_sum_exp - coefficients.predicted * statistics.predicted
    if coefficients.weighted is not None and statistics.weighted is not None:
        loss = loss - coefficients.weighted * statistics.weighted
    return loss


def z_losses(statistics: Statistics, coefficients: Coefficients) -> Tensor:
    """Return ``lse_square_scale * logsumexp(z)^2`` of every row."""
    log_normalizer = statistics.logits_max + statistics.log_sum_exp
    if coefficients.square is None:
        return torch.zeros_like(log_normalizer)
    return coefficients.square * log_normalizer.square()


@dataclass(frozen=True)
class Problem:
    """The arguments of a call, the same for all its kernels.

    Attributes:
        input: shape (N, H).
        linear_weight: shape (V, H).
        linear_bias: shape (V,).
        target: class indices, ``IGNORED`` or ``ELSEWHERE``, shape (N,), or probabilities, shape (N, V).
        class_weight: shape (V,).
        options: what shapes the logits.
        entropy: whether the entropy is used.
    """

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    options: Options
    entropy: bool = False

    def plan_statistics(self) -> Plan:
        """Cut rows and classes where only statistics are made."""
        return plan_statistics(self.input.shape[0], self.linear_weight, self.options, self._copies())

    def plan(self, with_gradient: bool = False) -> Plan:
        """Cut the rows where the logits of a row are needed together; the head may need a gradient."""
        units = _cpu.has_bfloat16_units(self.linear_weight)
        rows = self.input.shape[0]
        return plan_rows(rows, self.linear_weight, self.options, self._copies(), with_gradient, units)

    def how(self) -> str:
        """Say for a log what is not computed by torch.mm and torch.softmax."""
        return _cpu.how(self.linear_weight, self.input.shape[0])

    def _copies(self) -> int:
        """Return how many tensors of the logits' size are held beside each other."""
        return 1 + (self.options.softcap is not None) + self.entropy + 2 * self.target.is_floating_point()
