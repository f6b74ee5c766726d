"""One call of ``linear_cross_entropy``, from the function to the kernels, and the statistics that it asks for."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._checks import NON_NEGATIVE, OPTIONAL_POSITIVE, POSITIVE, check_number
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.ops import _tiling as tiling
from torch_aclnn_ops.ops._chunks import has_bfloat16_units
from torch_aclnn_ops.ops._tiling import Sizes, Tiling

import torch
from torch import Tensor

# The target of a row whose class is in another shard; that of an ignored row is ``_chunks.IGNORED``.
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

    def divided(self, divisor: Tensor | int, count: Tensor | int) -> "Coefficients":
        """Divide by the divisor of a mean, and ``square`` by that of its z-losses."""
        of_log_sum_exp = self.log_sum_exp / divisor
        return Coefficients(
            of_log_sum_exp,
            of_log_sum_exp if self.predicted is self.log_sum_exp else self.predicted / divisor,
            None if self.weighted is None else self.weighted / divisor,
            None if self.square is None else self.square / count,
        )


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


NAME = "linear_cross_entropy"


class Call(NamedTuple):
    """One call: first as given, then with checked options, rows in one dimension, and what follows from both."""

    # Tensors as the function takes them; for kernels the input has shape (N, H), the weight (V, H), and the target
    # class indices, ``IGNORED`` or ``ELSEWHERE``, of shape (N,), or probabilities of shape (N, V).
    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    weight: Tensor | None = None
    token_weight: Tensor | None = None
    # Options of the function.
    reduction: str = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    softcap: Annotated[float | None, OPTIONAL_POSITIVE] = None
    lse_square_scale: Annotated[float, NON_NEGATIVE] = 0.0
    temperature: Annotated[float, POSITIVE] = 1.0
    zero_if_all_ignored: bool = False
    outputs: Collection[str] = ()
    chunk_size: int | None = None
    max_memory: int | None = None
    # What follows from them.
    shape: tuple[int, ...] = ()  # of class indices
    gradients: tuple[bool, bool, bool] = (False, False, False)  # which of input, linear_weight and linear_bias need one
    weighted: bool = False  # whether the weighted sum of each row's logits is needed, for label smoothing
    entropy: bool = False
    predicted_tokens: bool = False
    is_shard: bool = False  # whether the classes are a shard of a vocabulary
    has_no_ignored: bool = False  # whether it is known that no row is ignored
    # Whether CANN's operators compute the statistics, except for predicted tokens, and the gradients if those of both
    # input and linear_weight are needed. ``None`` in compiled code, which chooses when it runs.
    is_fused: bool | None = None
    # Statistics of the forward pass, in the backward pass.
    logits_max: Tensor | None = None
    log_sum_exp: Tensor | None = None

    def ignored_class(self) -> int:
        """Return the class index of ignored rows."""
        return -100 if self.ignore_index is None else int(self.ignore_index)

    def finite_softcap(self, dtype: torch.dtype) -> float | None:
        """Return the softcap, or ``None`` for one that is infinite in the logits' dtype, which changes nothing."""
        if self.softcap is None or self.softcap / min(self.temperature, 1) <= torch.finfo(dtype).max:
            return self.softcap
        return None

    def name(self, results: Sequence[Any]) -> Statistics:
        """Convert a sequence of the results that are needed to :class:`Statistics`."""
        return Statistics(*scatter((True, True, True, self.weighted, self.entropy, self.predicted_tokens), results))

    def tile_rows(self, rows: int | None = None, classes: int | None = None, with_gradients: bool = True) -> Tiling:
        """Choose chunks of rows; raise ``ValueError`` if ``max_memory`` is too small.

        Args:
            rows: Replaces the number of rows.
            classes: Replaces the number of classes of the head.
            with_gradients: Whether the gradients that are needed are computed too.
        """
        weight = self.linear_weight
        rows = self.input.shape[0] if rows is None else rows
        classes = weight.shape[0] if classes is None else classes
        sizes = Sizes(rows, classes, weight.shape[1], weight.dtype, weight.is_cpu)
        units = has_bfloat16_units(weight)
        # Tensors of the logits' size that are alive at the same time.
        copies = 1 + (self.softcap is not None) + self.entropy + 2 * self.target.is_floating_point()
        if self.max_memory is not None and not weight.is_cpu:
            copies += 1  # the softmax, which is in place or of few rows on a CPU
        limits = self.chunk_size, self.max_memory
        return tiling.tile_rows(NAME, sizes, *limits, copies, with_gradients and self.gradients[1], units)

    def empty_statistics(self) -> list[Tensor]:
        """Return uninitialized tensors of the needed statistics, for fake tensors."""
        floats = [accumulation_dtype(self.input.dtype)] * (3 + self.weighted + self.entropy)
        dtypes = [*floats, *[torch.int64] * self.predicted_tokens]
        return [self.input.new_empty(self.input.shape[0], dtype=dtype) for dtype in dtypes]


# The rules of the numbers that PyTorch's function lacks.
_RULES = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Call, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
NUMBERS = tuple(_RULES)


def check_numbers(function: str, **given: Any) -> dict[str, Any]:
    """Check the types and ranges of numbers that PyTorch's function lacks, and return them as Python's numbers."""
    for name, value in given.items():
        if value is not None or Call._field_defaults[name] is not None:
            given[name] = check_number(function, name, value, _RULES[name])
    return given
