"""The kernel in torch calls: losses and gradients of rows, chunk by chunk, in buffers that are reused.

The student's logits of a chunk become its log-probabilities and then their own gradient, in place. All of it is
computed in float32 (float64 for float64). :mod:`torch_aclnn_ops.functional.linear_kl_div.formula` has the same
mathematics in differentiable calls.
"""

import math

from torch_aclnn_ops import _extension
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._tensors import without_autocast
from torch_aclnn_ops.functional._head.shards import gather_constant, sum_over_group
from torch_aclnn_ops.functional.linear_kl_div.call import NAME, Call
from torch_aclnn_ops.functional.linear_kl_div.formula import (
    Places,
    log_probabilities,
    log_probabilities_with_rest,
    losses_and_slopes,
)
from torch_aclnn_ops.ops._chunks import (
    Head,
    HeadGradients,
    KeptRows,
    Results,
    blocks_of,
    logits_buffer,
    part_of,
    reduce_in_chunks,
)
from torch_aclnn_ops.ops._tiling import Tiling, rows_of_block

import torch
from torch import Tensor


class _Kernel:
    """State that the chunks of a call share."""

    def __init__(self, call: Call, kept: KeptRows, cut: Tiling) -> None:
        self.call, self.kept = call, kept
        self.head = Head(call.linear_weight, call.linear_bias, 1 / call.temperature, cut.rows)
        self.teacher_head: Head | None = None
        self._teacher_buffer: Tensor | None = None
        weight = call.teacher_weight
        if weight is not None:
            self.teacher_head = Head(weight, call.teacher_bias, 1 / call.temperature, cut.rows)
            self._teacher_buffer = logits_buffer(weight, self.teacher_head, cut)

    def teacher_logits(self, rows: slice) -> Tensor | None:
        """Return the teacher's logits, or None if it has no head."""
        if self.teacher_head is None or self._teacher_buffer is None:
            return None
        input = self.kept.select(self.call.teacher_input, rows)
        return self.teacher_head.logits(input, part_of(self._teacher_buffer, slice(0, input.shape[0])))

    def log_sum(self, parts: Tensor) -> Tensor:
        """Return the log-sum-exp over the processes, the same on all of them."""
        shards = self.call.shards
        return parts if shards is None else gather_constant(parts, shards.members).logsumexp(0)

    def sum(self, parts: Tensor) -> Tensor:
        """Return the sum over the processes, the same on all of them."""
        shards = self.call.shards
        return parts if shards is None else gather_constant(parts, shards.members).sum(0)

    def _normalized(self, student: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Turn logits into log-probabilities, in one collective where processes share a vocabulary."""
        found = [student] if teacher is None else [student, teacher]
        if self.call.shards is None:
            found = [_log_softmax(logits) for logits in found]
        else:
            offsets = torch.stack([logits.amax(1) for logits in found])
            for logits, offset in zip(found, offsets, strict=True):
                logits.sub_(offset.unsqueeze(1))
            log_sums = torch.stack([logits.logsumexp(1) for logits in found])
            gathered = gather_constant(torch.stack([offsets, log_sums]), self.call.shards.members)
            largest = gathered[:, 0].amax(0)
            total = (gathered[:, 1] + (gathered[:, 0] - largest)).logsumexp(0)
            for logits, log_sum in zip(found, (largest - offsets) + total, strict=True):
                logits.sub_(log_sum.unsqueeze(1))
        return found[0], found[1] if len(found) > 1 else None

    def blocks(self, logits: Tensor, rows: slice, factors: Tensor | None) -> list[Results]:
        """Compare the rows of a chunk, as many at once as fit a cache (all if processes share a vocabulary)."""
        number, call, teacher_logits = logits.shape[0], self.call, self.teacher_logits(rows)
        size = rows_of_block(logits.shape[1], logits.itemsize) if call.has_small_blocks() else number
        results: list[Results] = []
        for of_input in blocks_of(rows, size):
            block = slice(of_input.start - rows.start, of_input.stop - rows.start)
            labels, values, indices = (
                self.kept.select(one, of_input) for one in (call.labels(), call.teacher_values, call.teacher_indices)
            )
            given = call._replace(teacher_values=values, teacher_indices=indices)
            of_teacher = None if teacher_logits is None else teacher_logits[block]
            of_rows = None if factors is None else factors[of_input]
            losses = self.compare(logits[block], of_teacher, given, labels, of_rows)
            results.append(() if losses is None else (losses,))
        return results

    def compare(
        self, student: Tensor, teacher_logits: Tensor | None, given: Call, labels: Tensor | None, factors: Tensor | None
    ) -> Tensor | None:
        """Return the losses of some rows, if needed; with factors, overwrite the student's logits by their gradient."""
        gradient = student
        student, teacher_logits = self._normalized(student, teacher_logits)
        if labels is None:
            return self._compare(student, teacher_logits, given, factors, gradient)
        of_labels, their_gradient = self._cross_entropy(student, labels, factors)
        losses = self._compare(student, teacher_logits, given, factors, gradient)
        if their_gradient is not None:
            gradient.add_(their_gradient)
        return None if losses is None else losses + of_labels

    def _cross_entropy(self, student: Tensor, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weighted cross entropy of the labels, at a temperature of 1, and its gradient."""
        temperature, weight = self.call.temperature, self.call.hard_weight
        classes = self.call.classes()
        logits = student * temperature
        log_sums = self.log_sum(logits.logsumexp(1))
        is_here = ((labels >= classes.start) & (labels < classes.stop)).unsqueeze(1)
        columns = (labels - classes.start).clamp(0, student.shape[1] - 1).unsqueeze(1)
        of_labels = self.sum(logits.gather(1, columns).masked_fill(~is_here, 0).squeeze(1))
        losses = weight * (log_sums - of_labels)
        if factors is None:
            return losses, None
        gradient = logits.sub_(log_sums.unsqueeze(1)).exp_()
        # Not a cast: torch_npu casts a mask to float32.
        gradient.scatter_add_(1, columns, gradient.new_zeros(columns.shape).masked_fill_(is_here, -1))
        return losses, gradient.mul_((weight * temperature) * factors.unsqueeze(1))

    def _compare(
        self, student: Tensor, teacher_logits: Tensor | None, given: Call, factors: Tensor | None, gradient: Tensor
    ) -> Tensor | None:
        """Compare log-probabilities of the student; with factors, overwrite ``gradient``."""
        if given.teacher_indices is not None:
            return self._losses_of_some_classes(student, given, factors, gradient)
        teacher = teacher_logits if teacher_logits is not None else log_probabilities(given)
        losses, slopes = self._losses_and_slopes(student, teacher.to(student.dtype), factors is not None)
        sums = [losses, None if slopes is None or factors is None else slopes.sum(1)]
        if self.call.shards is not None:
            summed = iter(self.sum(torch.stack([one for one in sums if one is not None])))
            sums = [None if one is None else next(summed) for one in sums]
        losses, total = sums
        if factors is not None and slopes is not None and total is not None:
            torch.exp(student, out=gradient).mul_(total.unsqueeze(1))
            torch.sub(slopes, gradient, out=gradient).mul_(factors.unsqueeze(1))
        return losses

    def _losses_and_slopes(
        self, student: Tensor, teacher: Tensor, with_slopes: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        call = self.call
        of_rows = (student, teacher, call.may_be_masked())
        return losses_and_slopes(call.divergence, call.beta, *of_rows, not call.recomputes, with_slopes)

    def _losses_of_some_classes(
        self, student: Tensor, given: Call, factors: Tensor | None, gradient: Tensor
    ) -> Tensor | None:
        """Compare with a top-k teacher, all of whose other classes count as one."""
        places = Places.of(given)
        few = self.log_sum(places.log_probabilities(student))
        teacher = log_probabilities_with_rest(given, few)
        losses, slopes = self._losses_and_slopes(few, teacher, factors is not None)
        if factors is None or slopes is None:
            return losses
        # The softmax over the other classes, whose share of the probability may be too small to divide by; at most 1 at
        # the top-k classes, whose gradient then replaces it.
        rest, total = few[:, -1:], slopes.sum(1, keepdim=True)
        offset = rest.masked_fill(rest == -math.inf, 0)
        factor = torch.where(rest == -math.inf, 0, slopes[:, -1:]) - rest.exp() * total
        at_others = (few[:, :-1] - offset).clamp(max=0).exp() * factor
        at_classes = (slopes[:, :-1] - few[:, :-1].exp() * total - at_others).masked_fill(~places.is_here, 0)
        torch.sub(student, offset, out=gradient).clamp_(max=0).exp_().mul_(factor)
        gradient.scatter_add_(1, places.columns, at_classes).mul_(factors.unsqueeze(1))
        return losses


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, 1, out=logits) if logits.is_cpu else logits.log_softmax(1)


@without_autocast
def losses_in_chunks(call: Call, factors: Tensor | None) -> tuple[Results, HeadGradients]:
    """Compute the losses of rows, 0 for ignored ones, and with factors the gradients of ``(losses * factors).sum()``.

    The call of a backward pass returns no losses.
    """
    if call.input.device.type == "npu":
        _extension.check_queue(NAME)
    kept = KeptRows(call.target, call.input.shape[0])
    cut = call.tile_rows(kept.number)
    log_call(NAME, Implementation.FALLBACK, lambda: _describe(call, cut, factors is not None))
    needed = None if factors is None else call.gradients
    kernel = _Kernel(call, kept, cut)
    # The head's products are divided by the temperature, and so are the gradients that pass through them.
    factors = kept.select(factors)
    if factors is not None and call.temperature != 1:
        factors = factors / call.temperature

    def reduce_chunk(logits: Tensor, rows: slice) -> list[Results]:
        return kernel.blocks(logits, rows, factors)

    results, gradients = reduce_in_chunks(call.input, kernel.head, kept, cut, reduce_chunk, needed)
    input_grad, weight_grad, bias_grad = gradients
    if input_grad is not None and call.shards is not None and call.reduce_input_grad:
        input_grad = sum_over_group(input_grad, call.shards.members)
    return results, (input_grad, weight_grad, bias_grad)


def _describe(call: Call, cut: Tiling, with_gradients: bool) -> str:
    reason = f"the tensors are on {call.input.device.type}"
    if call.input.device.type == "npu":
        reason = "CANN has no operator for it"
    made = "; gradients with the losses" if with_gradients else ""
    return f"{reason}{made}; {cut}"
