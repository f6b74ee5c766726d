"""Statistics of a vocabulary from those of its parts: blocks that fit a cache, or the shards of several processes."""

from collections.abc import Sequence

from torch_aclnn_ops.ops.linear_cross_entropy._problem import Statistics

import torch
from torch import Tensor


def combine(
    found: Statistics, masses: Tensor, starts: Sequence[int], weight_sums: Sequence[Tensor | int]
) -> Statistics:
    """Compute the statistics of all classes from those of the parts, in differentiable torch calls.

    With each part's maximum m_r and log-sum-exp l_r, and m and l those of all, part r has the share
    ``exp(l_r + m_r - m - l)`` of the probabilities. Sums over ``z - m_r`` become sums over ``z - m`` by adding ``m_r -
    m`` times the sum of the factors.

    Args:
        found: the statistics of the parts, shape (parts, N) each.
        masses: the sum of each row's target distribution in each part, shape (parts, N).
        starts: the first class of each part.
        weight_sums: the sum of the class weights of each part.
    """
    maxima = found.logits_max.detach()
    logits_max = maxima.amax(0)
    shift = maxima - logits_max
    log_sum_exp = (found.log_sum_exp + shift).logsumexp(0)
    # A part whose classes are all masked by their bias has the shift -inf; 0 times that is to be 0.
    predicted = (found.predicted + torch.where(masses == 0, 0, masses * shift)).sum(0)
    weighted = entropy = tokens = None
    if found.weighted is not None:
        sums = [factor * row for factor, row in zip(weight_sums, shift.unbind(), strict=True)]
        weighted = (found.weighted + torch.stack(sums)).sum(0)
    if found.entropy is not None:
        log_shares = found.log_sum_exp + shift - log_sum_exp
        shares = log_shares.exp()
        entropy = (shares * (found.entropy - log_shares.masked_fill(shares == 0, 0))).sum(0)
    if found.predicted_tokens is not None:
        classes = [row + start for row, start in zip(found.predicted_tokens.unbind(), starts, strict=True)]
        largest = maxima.argmax(0, keepdim=True)  # the first of equals
        tokens = torch.stack(classes).gather(0, largest).squeeze(0)
    return Statistics(logits_max, log_sum_exp, predicted, weighted, entropy, tokens)
