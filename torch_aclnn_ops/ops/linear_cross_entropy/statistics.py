"""The statistics that the logits of each row are reduced to, and the losses computed from them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch_aclnn_ops.ops._head import IGNORED as IGNORED

import torch
from torch import Tensor

# The target of a row whose class is in another shard; that of an ignored row is IGNORED.
ELSEWHERE = -2


class Statistics(NamedTuple):
    """Statistics of the logits ``z`` of each row, shape (N,) each; ``logits_max`` is detached."""

    logits_max: Tensor  # ``max z``
    log_sum_exp: Tensor  # ``log sum exp(z - max)``
    predicted: Tensor  # ``z[target] - max``, or ``sum(target * class_weight * (z - max))`` for probabilities
    weighted: Tensor | None = None  # ``sum(class_weight * (z - max))``
    entropy: Tensor | None = None  # of the softmax, in nats
    predicted_tokens: Tensor | None = None  # the class of the largest logit

    def without(self, ignored: Tensor) -> "Statistics":
        """Set the statistics of ignored rows to zero, and their predicted token to -1."""
        *values, tokens = (None if rows is None else rows.masked_fill(ignored, 0) for rows in self)
        return Statistics._make((*values, None if tokens is None else tokens.masked_fill(ignored, -1)))


class Coefficients(NamedTuple):
    """The factors of each row's statistics in its loss, shape (N,) each.

    The loss is a sum, in which ``predicted`` and ``weighted`` are subtracted, and ``square`` is the factor of the
    squared log-sum-exp (the z-loss).
    """

    log_sum_exp: Tensor
    predicted: Tensor
    weighted: Tensor | None = None
    square: Tensor | None = None
    entropy: Tensor | None = None

    def divided(self, divisor: Tensor, count: Tensor) -> "Coefficients":
        """Divide by the divisor of a mean, and ``square`` by that of its z-losses."""
        log_sum_exp, predicted, weighted, square, entropy = self
        of_log_sum_exp = log_sum_exp / divisor
        of_predicted = of_log_sum_exp if predicted is log_sum_exp else predicted / divisor
        others = [(weighted, divisor), (square, count), (entropy, divisor)]
        return Coefficients(of_log_sum_exp, of_predicted, *(None if one is None else one / by for one, by in others))


def cross_entropies(statistics: Statistics, coefficients: Coefficients) -> Tensor:
    """Return the loss of every row without the z-loss.

    It is ``sum_v Q_v (log sum exp(z) - z_v)``, where Q is the weighted and smoothed target.
    """
    if coefficients.predicted is coefficients.log_sum_exp:
        loss = coefficients.predicted * (statistics.log_sum_exp - statistics.predicted)
    else:
        loss = coefficients.log_sum_exp * statistics.log_sum_exp - coefficients.predicted * statistics.predicted
    if coefficients.weighted is not None and statistics.weighted is not None:
        loss = loss - coefficients.weighted * statistics.weighted
    return loss


def z_losses(statistics: Statistics, coefficients: Coefficients) -> Tensor | None:
    """Return the z-loss ``lse_square_scale * logsumexp(z)^2`` of every row, or ``None`` if it is disabled."""
    if coefficients.square is None:
        return None
    return coefficients.square * (statistics.logits_max + statistics.log_sum_exp).square()


def losses_of_rows(statistics: Statistics, coefficients: Coefficients) -> Tensor:
    """Return the loss of every row."""
    losses, z_loss = cross_entropies(statistics, coefficients), z_losses(statistics, coefficients)
    return losses if z_loss is None else losses + z_loss


def combine(
    found: Statistics, target_probability_sums: Tensor, parts: Sequence[slice], class_weight: Tensor | None
) -> Statistics:
    """Differentiably combine the statistics of parts of the vocabulary into those of all classes.

    With maximum m_r and log-sum-exp l_r of part r, and m and l of all classes, part r has the probability
    ``exp(l_r + m_r - m - l)``. Sums over ``z - m_r`` become sums over ``z - m`` by adding ``m_r - m`` times the sum of
    the coefficients.

    The statistics of the parts, and the target's probability in each of them, have shape (parts, N).
    """
    maxima = found.logits_max.detach()
    logits_max = maxima.amax(0)
    offset = maxima - logits_max
    log_sum_exp = (found.log_sum_exp + offset).logsumexp(0)
    predicted = torch.addcmul(found.predicted, target_probability_sums.to(offset.dtype), offset).sum(0)
    weighted = entropy = tokens = None
    if found.weighted is not None:
        factors = [part.stop - part.start if class_weight is None else class_weight[part].sum() for part in parts]
        sums = [factor * row for factor, row in zip(factors, offset.unbind(), strict=True)]
        weighted = (found.weighted + torch.stack(sums)).sum(0)
    if found.entropy is not None:
        log_shares = found.log_sum_exp + offset - log_sum_exp
        entropy = (log_shares.exp() * (found.entropy - log_shares)).sum(0)
    if found.predicted_tokens is not None:
        classes = [row + part.start for row, part in zip(found.predicted_tokens.unbind(), parts, strict=True)]
        largest = maxima.argmax(0, keepdim=True)  # the first one if equal
        tokens = torch.stack(classes).gather(0, largest).squeeze(0)
    return Statistics(logits_max, log_sum_exp, predicted, weighted, entropy, tokens)
