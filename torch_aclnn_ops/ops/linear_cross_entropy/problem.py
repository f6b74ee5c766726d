"""What the kernels of a linear cross entropy are given, and what they return."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_aclnn_ops.ops._checks import values_are_readable
from torch_aclnn_ops.ops._raw_function import scatter
from torch_aclnn_ops.ops.linear_cross_entropy import plan
from torch_aclnn_ops.ops.linear_cross_entropy.plan import LogitOptions, Plan, Sizes
from torch_aclnn_ops.ops.linear_cross_entropy.products import has_bfloat16_units

import torch
from torch import Tensor

# Targets that are no class of the head: of an ignored row, and of a row whose class is in another part.
IGNORED = -1
ELSEWHERE = -2


class Statistics(NamedTuple):
    """What the logits ``z`` of each row are reduced to, shape (N,) each; ``max`` is a constant to derivatives."""

    logits_max: Tensor  # ``max z``
    log_sum_exp: Tensor  # ``log sum exp(z - max)``
    predicted: Tensor  # ``z[target] - max``, or ``sum(target * class_weight * (z - max))`` for probabilities
    weighted: Tensor | None = None  # ``sum(class_weight * (z - max))``
    entropy: Tensor | None = None  # of the softmax, in nats
    predicted_tokens: Tensor | None = None  # the class of the largest logit

    def without(self, ignored: Tensor) -> "Statistics":
        """Return zeros for ignored rows, and the predicted token -1."""
        *values, tokens = (None if rows is None else rows.masked_fill(ignored, 0) for rows in self)
        return Statistics._make((*values, None if tokens is None else tokens.masked_fill(ignored, -1)))


class Coefficients(NamedTuple):
    """The factors of each row's statistics in its loss, shape (N,) each; ``square`` belongs to the z-loss."""

    log_sum_exp: Tensor
    predicted: Tensor
    weighted: Tensor | None = None
    square: Tensor | None = None


def cross_entropies(statistics: Statistics, coefficients: Coefficients) -> Tensor:
    """Return the loss of every row without the z-loss.

    It is ``sum_v Q_v (log sum exp(z) - z_v)``, where Q is the weighted and smoothed target.
    """
    loss = coefficients.log_sum_exp * statistics.log_sum_exp - coefficients.predicted * statistics.predicted
    if coefficients.weighted is not None and statistics.weighted is not None:
        loss = loss - coefficients.weighted * statistics.weighted
    return loss


def z_losses(statistics: Statistics, coefficients: Coefficients) -> Tensor | None:
    """Return ``lse_square_scale * logsumexp(z)^2`` of every row, if it is part of the loss."""
    if coefficients.square is None:
        return None
    return coefficients.square * (statistics.logits_max + statistics.log_sum_exp).square()


def losses_of_rows(statistics: Statistics, coefficients: Coefficients) -> Tensor:
    """Return the loss of every row."""
    losses, z_loss = cross_entropies(statistics, coefficients), z_losses(statistics, coefficients)
    return losses if z_loss is None else losses + z_loss


@dataclass(frozen=True)
class Request:
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


class Problem(NamedTuple):
    """The arguments of a call, the same for all its kernels."""

    input: Tensor  # shape (N, H)
    linear_weight: Tensor  # shape (V, H)
    linear_bias: Tensor | None  # shape (V,)
    target: Tensor  # class indices, ``IGNORED`` or ``ELSEWHERE``, shape (N,), or probabilities, shape (N, V)
    class_weight: Tensor | None  # shape (V,)
    options: LogitOptions  # what shapes the logits and their chunks
    request: Request = Request()  # what is asked for

    @property
    def is_plain(self) -> bool:
        """Whether the logits are the products, but for the temperature, and the targets are classes."""
        return self.linear_bias is None and self.options.softcap is None and not self.target.is_floating_point()

    def plan_statistics(self) -> Plan:
        """Cut rows and classes where only statistics are made."""
        return plan.plan_statistics(self._sizes(), self.options, self._copies())

    def plan_rows(self) -> Plan:
        """Cut the rows where the logits of a row are needed together, or refuse a ``max_memory`` that is too little."""
        weight, needs_weight_gradient = self.linear_weight, self.request.gradients[1]
        units = weight.dtype == torch.bfloat16 and has_bfloat16_units(weight)
        has_numbers = type(self.input.shape[0]) is int and not torch.compiler.is_compiling()
        cut = plan.plan_rows_once if has_numbers else plan.plan_rows
        return cut(self._sizes(), self.options, self._copies(), needs_weight_gradient, units)

    def _sizes(self) -> Sizes:
        weight = self.linear_weight
        return Sizes(self.input.shape[0], weight.shape[0], weight.shape[1], weight.dtype, weight.is_cpu)

    def _copies(self) -> int:
        """Return how many tensors of the logits' size are held beside each other."""
        return 1 + (self.options.softcap is not None) + self.request.entropy + 2 * self.target.is_floating_point()


class PlainLoss(NamedTuple):
    """A scalar loss that is the cross entropies of the rows, or their mean; class indices are the caller's."""

    reduction: str
    ignore_index: int


class KeptRows:
    """The rows of a problem that are not ignored.

    The others are dropped where looking for them waits for no device. Elsewhere they become rows of zeros, so that
    nothing that is not finite gets from them into a sum, with coefficients of 0.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._rows = problem.input.shape[0]
        self._kept: Tensor | None = None
        self._ignored: Tensor | None = None
        target = problem.target
        if target.is_floating_point():
            return
        if not values_are_readable(target):
            self._ignored = target == IGNORED
            self.problem = problem._replace(input=problem.input.masked_fill(self._ignored.unsqueeze(1), 0))
        elif self._rows > 0 and int(target.min()) < 0:
            kept = (target != IGNORED).nonzero().squeeze(1)
            if kept.shape[0] < self._rows:
                self._kept = kept
                self.problem = problem._replace(input=problem.input[kept], target=target[kept])

    def of(self, values: Tensor | None) -> Tensor | None:
        """Return the values of the rows that are left; zeros of those that are ignored."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored, 0)
        return values if self._kept is None else values[self._kept]

    def at_all_rows(self, values: Tensor | None, elsewhere: int = 0) -> Tensor | None:
        """Return the values with others, ``elsewhere``, for the rows that are ignored."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(self._ignored.reshape(-1, *(1,) * (values.dim() - 1)), elsewhere)
        if self._kept is None:
            return values
        return values.new_full((self._rows, *values.shape[1:]), elsewhere).index_copy_(0, self._kept, values)


def combine(
    found: Statistics, target_probability_sums: Tensor, parts: Sequence[slice], class_weight: Tensor | None
) -> Statistics:
    """Compute the statistics of all classes from those of parts of the vocabulary, in differentiable torch calls.

    With each part's maximum m_r and log-sum-exp l_r, and m and l those of all, part r has the share
    ``exp(l_r + m_r - m - l)`` of the probabilities. Sums over ``z - m_r`` become sums over ``z - m`` by adding ``m_r -
    m`` times the sum of the factors.

    The results of the parts have shape (parts, N) each; ``target_probability_sums`` are those of each row's target
    distribution, ``parts`` the classes of each part, and ``class_weight`` is that of all classes.
    """
    maxima = found.logits_max.detach()
    logits_max = maxima.amax(0)
    shift = maxima - logits_max
    log_sum_exp = (found.log_sum_exp + shift).logsumexp(0)
    # A part whose classes are all masked by their bias has the shift -inf; 0 times that is to be 0.
    shifts = torch.where(target_probability_sums == 0, 0, target_probability_sums * shift)
    predicted = (found.predicted + shifts).sum(0)
    weighted = entropy = tokens = None
    if found.weighted is not None:
        factors = [part.stop - part.start if class_weight is None else class_weight[part].sum() for part in parts]
        sums = [factor * row for factor, row in zip(factors, shift.unbind(), strict=True)]
        weighted = (found.weighted + torch.stack(sums)).sum(0)
    if found.entropy is not None:
        log_shares = found.log_sum_exp + shift - log_sum_exp
        shares = log_shares.exp()
        entropy = (shares * (found.entropy - log_shares.masked_fill(shares == 0, 0))).sum(0)
    if found.predicted_tokens is not None:
        classes = [row + part.start for row, part in zip(found.predicted_tokens.unbind(), parts, strict=True)]
        largest = maxima.argmax(0, keepdim=True)  # the first of equals
        tokens = torch.stack(classes).gather(0, largest).squeeze(0)
    return Statistics(logits_max, log_sum_exp, predicted, weighted, entropy, tokens)
