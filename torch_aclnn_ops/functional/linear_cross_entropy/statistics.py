"""The statistics of rows: as the engine of losses on a head computes them, and of a vocabulary that is sharded.

Each rank of a process group reduces the logits of its own classes. One collective gathers the statistics of all ranks,
from which every rank computes those of the full vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_aclnn_ops._autograd.derivatives import any_differentiated, in_functorch_transform
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._tensors import accumulation_dtype, widen
from torch_aclnn_ops.functional._head.agreement import ROWS, Agreed, Summary, compare_summaries, nan_if, summarize
from torch_aclnn_ops.functional._head.engine import Engine
from torch_aclnn_ops.functional._head.loss import HeadLoss
from torch_aclnn_ops.functional._head.shards import (
    Members,
    VocabularyShards,
    copy_to_group,
    gather,
    gather_constant,
    raise_if_not_compilable,
)
from torch_aclnn_ops.functional.linear_cross_entropy.losses import distribution_sums
from torch_aclnn_ops.ops._chunks import IGNORED, HeadGradients, Results
from torch_aclnn_ops.ops.linear_cross_entropy.call import (
    ELSEWHERE,
    NUMBERS,
    Call,
    Coefficients,
    Statistics,
    combine,
    losses_of_rows,
)
from torch_aclnn_ops.ops.linear_cross_entropy.fused import Reduced
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import reduce, statistics_of_rows, why_not_fused

import torch
from torch import Tensor

# Fields that become coefficients of the statistics, or are decided before the statistics are computed.
_UNREAD = (
    "token_weight reduction ignore_index label_smoothing lse_square_scale zero_if_all_ignored outputs shape is_fused"
    " has_no_ignored"
).split()
# Options that must be the same on all ranks.
_AGREED = (*NUMBERS, "reduction", "label_smoothing", "zero_if_all_ignored")


class _CrossEntropy(HeadLoss):
    number_of_factors = len(Coefficients._fields)
    number_of_saved = 2

    def reduce(self, call: Call, factors: Sequence[Tensor | None] | None) -> tuple[Results, HeadGradients]:
        return reduce(call, None if factors is None else Coefficients._make(factors))

    def formula(self, call: Call) -> Results:
        return statistics_of_rows(call)

    def total(self, call: Call, results: Results, factors: Sequence[Tensor | None]) -> Tensor:
        return losses_of_rows(call.name(results), Coefficients._make(factors)).sum()

    def differentiable(self, call: Call) -> range:
        return range(1, 3 + call.weighted + call.entropy)  # the loss does not depend on logits_max

    def beside_total(self, call: Call) -> range:
        first = 3 + call.weighted + call.entropy
        return range(first, first + call.predicted_tokens)

    def backward_call(self, call: Call, results: Results) -> Call:
        return call._replace(predicted_tokens=False, logits_max=results[0], log_sum_exp=results[1])

    def factors_of(self, call: Call, grads: Sequence[Tensor]) -> Coefficients:
        _, log_sum_exp, predicted, weighted, entropy, _ = call.name(grads)
        return Coefficients(log_sum_exp, -predicted, None if weighted is None else -weighted, None, entropy)

    def empty(self, call: Call) -> list[Tensor]:
        return call.empty_statistics()


LOSS = _CrossEntropy("linear_cross_entropy", Call, _UNREAD, of_rows=["target"])
ENGINE = Engine(LOSS)


def statistics(call: Call) -> Statistics:
    """Reduce the logits of every row, differentiably to any order.

    Returns:
        The needed statistics in float32, or float64 for float64 inputs.
    """
    if call.is_fused is None and not torch.compiler.is_compiling():  # which applies to the gradients, too
        call = call._replace(is_fused=why_not_fused(call) is None)
    return call.name(ENGINE.rows(call))


@dataclass(frozen=True)
class SharedVocabulary:
    """The part of this rank in a call whose classes are spread over ranks.

    Every rank must make the same call, and differentiate the same function of the results, which are the same on all
    ranks, as are the gradients of input, target and class weights. Those of weight and bias are this rank's.
    """

    shards: VocabularyShards
    agreed: Agreed  # what must be the same on all ranks
    reduces_gradient: bool  # whether one more collective sums the gradient of the input, else a partial sum, over ranks

    def statistics(self, call: Call) -> Statistics:
        """Reduce the logits of every row to the statistics of all classes; ``call`` has this rank's head."""
        raise_if_not_compilable()
        summary = self._summarize(call, accumulation_dtype(call.input.dtype))
        local, target_probability_sum = _local_call(call, self.shards, self.reduces_gradient)
        rows = statistics(local)
        gathered, disagree = self._exchange((*rows, target_probability_sum), summary, gather)
        *parts, sums = gathered.unbind(1)
        remaining = iter(parts)
        found = Statistics._make(None if row is None else next(remaining).to(row.dtype) for row in rows)
        results = combine(found, sums, self.shards.slices(), call.weight)
        if not call.target.is_floating_point():
            results = results.without(call.target == IGNORED)
        if disagree is None:
            return results
        factor = nan_if(disagree, summary.factors.dtype)
        *values, tokens = results
        return Statistics._make((*(None if row is None else row * factor for row in values), tokens))

    def combine_reduced(self, call: Call, reduced: Reduced) -> Reduced:
        """Combine what CANN's operators reduce this rank's logits to with the other ranks' results.

        The masks and places of targets remain this rank's. Not differentiable.
        """
        rows = reduced.logits_max, reduced.sum_exp_logits, reduced.predicted, reduced.has_class
        summary = self._summarize(call, reduced.logits_max.dtype)
        gathered, disagree = self._exchange(rows, summary, gather_constant)
        if disagree is not None:
            gathered.masked_fill_(disagree, math.nan)
        # In place: shard r has exp(m_r - m) of its sum, and its target's logit is m_r - m lower.
        maxima, sums, predicted, is_here = gathered.unbind(1)
        logits_max = maxima.amax(0)
        offset = maxima.sub_(logits_max)
        predicted.addcmul_(is_here, offset)
        sums.mul_(offset.exp())
        sum_exp_logits, predicted, has_class = gathered[:, 1:].sum(0).unbind()
        return reduced._replace(
            logits_max=logits_max,
            sum_exp_logits=sum_exp_logits,
            predicted=predicted,
            has_class=has_class.bool(),
            is_here=reduced.has_class,
        )

    def _summarize(self, call: Call, dtype: torch.dtype) -> Summary:
        target = None if call.target.is_floating_point() else call.target
        return summarize(self.agreed, self.shards.sizes, call.input, call.linear_weight, target, dtype)

    def _exchange(
        self, rows: Sequence[Tensor | None], summary: Summary, gather: Callable[[Tensor, Members], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Gather values of rows, shape (ranks, given, N), and compare calls, in one collective.

        The second result is that of :func:`compare_summaries`.
        """
        given = [row for row in rows if row is not None]
        messages = gather(torch.cat([*summary.sent, *given]), self.shards.members)
        summaries = messages[:, : summary.size]
        disagree = compare_summaries("linear_cross_entropy", self.agreed, summary, summaries, self.shards.sizes)
        return messages[:, summary.size :].unflatten(1, (len(given), given[0].shape[0])), disagree


def shared_vocabulary(
    call: Call, shards: VocabularyShards, reduce_input_grad: bool, is_fused: bool
) -> SharedVocabulary:
    """Describe a call, which the other ranks make, too.

    Ranks that do not agree about ``is_fused`` have different messages, and different collectives in derivatives.
    """
    reduces_gradient = reduce_input_grad and (in_functorch_transform() or any_differentiated([call.input]))
    agreed: dict[str, Any] = {
        ROWS: call.input.shape[0],
        "the number of features of input": call.input.shape[1],
        "vocab_sizes": shards.sizes,
        "whether target has probabilities": call.target.is_floating_point(),
        "reduce_input_grad": reduce_input_grad,
        "ignore_index": call.ignored_class(),
        "whether input needs a gradient": reduces_gradient,
        "whether token_weight is given": call.token_weight is not None,
        "whether weight is given": call.weight is not None,
        **{name: getattr(call, name) for name in _AGREED},
        # The last one, because other differences cause it.
        "whether CANN's operators compute the loss": is_fused,
    }
    return SharedVocabulary(shards, agreed, reduces_gradient)


def _local_call(call: Call, shards: VocabularyShards, reduces_gradient: bool) -> tuple[Call, Tensor]:
    """Return the call for this rank's classes, and the target probability in them for each row."""
    members, classes = shards.members, shards.own
    class_weight, target = call.weight, call.target
    class_weight = None if class_weight is None else copy_to_group(class_weight, members)[classes]
    if target.is_floating_point():
        target = copy_to_group(target, members)[:, classes]
        target_probability_sum = distribution_sums(target, class_weight, accumulation_dtype(call.input.dtype))
    else:
        is_here = (target >= classes.start) & (target < classes.stop)
        elsewhere = torch.where(target == IGNORED, IGNORED, ELSEWHERE)
        target = torch.where(is_here, target - classes.start, elsewhere)
        target_probability_sum = is_here
    local = call._replace(target=target, weight=class_weight, is_shard=True)
    if reduces_gradient:
        # Partial 16-bit gradients are summed in float32 and rounded once. The fused operators round each part.
        is_fused = call.is_fused
        if is_fused is None:  # the choice of the compiled operator is not known yet
            is_fused = call.input.device.type == "npu" and not is_disabled()
        input = call.input if is_fused else widen(call.input)
        local = local._replace(input=copy_to_group(input, members))
    return local, target_probability_sum
