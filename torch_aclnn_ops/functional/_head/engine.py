"""The engine of losses on a head: gradients computed with the loss, or from recomputed logits, or by the formula.

A loss on the output of a linear layer supplies an object like :class:`HeadLoss`. From it follow:

=====================================  ===============================================================================
a scalar with gradients                :meth:`Engine.weighted_sum`: loss and gradients in one pass, chunk by chunk
values of rows                         :meth:`Engine.rows`: the backward pass recomputes the logits, chunk by chunk
inside transforms, with tangents       the formula, in differentiable torch calls
a backward pass with create_graph      the formula, each chunk under ``torch.utils.checkpoint``
compiled code                          the first two, as one operator
=====================================  ===============================================================================
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch_aclnn_ops._autograd.derivatives import (
    any_differentiated,
    any_wrapped,
    as_function_of,
    has_tangent,
    in_functorch_transform,
    is_batched,
    recomputed,
    scatter,
    vjp,
)
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._tensors import widen, without_autocast
from torch_aclnn_ops._torch_compat.private import fast_apply, in_forward_ad, is_legacy_batchedtensor
from torch_aclnn_ops._torch_compat.public import in_jit_trace
from torch_aclnn_ops.functional._head.loss import HEAD_TENSORS, HeadLoss, HeadOperator
from torch_aclnn_ops.ops._chunks import Results

import torch
from torch import Tensor


class Engine:
    """Computes the calls of a loss; the ``HeadLoss`` supplies what is specific to it."""

    def __init__(self, loss: HeadLoss) -> None:
        self._loss = loss
        self._operator = HeadOperator(loss)

    def rows(self, call: Any) -> Results:
        """Compute the results of every row, differentiably to any order."""
        if self.needs_formula(call):
            log_call(self._loss.name, Implementation.FALLBACK, _why_formula)
            return _by_formula(self._loss, call)
        if torch.compiler.is_compiling():
            return self._operator.rows(call)
        return _apply(*call[:HEAD_TENSORS], self._loss, call, None)

    def weighted_sum(self, call: Any, factors: Sequence[Tensor | None]) -> Results:
        """Compute the total, whose gradients are computed in the same pass, and the results that go with it.

        Only where :meth:`needs_formula` is false; the factors are constants.
        """
        if torch.compiler.is_compiling():
            return self._operator.total(call, factors)
        return _apply(*call[:HEAD_TENSORS], self._loss, call, factors)

    def needs_formula(self, call: Any, *others: Tensor | None) -> bool:
        """Return whether only the formula has the derivatives: for other arguments, in a transform, or with tangents.

        ``others`` are tensors with which the results are multiplied.
        """
        is_compiling, tensors = torch.compiler.is_compiling(), self._loss.tensors(call)
        if in_functorch_transform() or (is_compiling and in_forward_ad()) or any_differentiated(tensors):
            return True
        if is_compiling:
            return False
        if type(call[0].shape[0]) is not int or type(call[1].shape[0]) is not int:  # symbolic
            return True
        given = [one for one in (*call[:HEAD_TENSORS], *tensors, *others) if one is not None]
        if in_jit_trace() or any_wrapped(given) or any(map(is_legacy_batchedtensor, given)):
            return True
        return in_forward_ad() and any(map(has_tangent, given))


def _why_formula() -> str:
    where = "inside a transform" if in_functorch_transform() else "for derivatives that kernels do not have"
    return f"{where}; in differentiable torch calls"


@without_autocast
def _by_formula(loss: HeadLoss, call: Any) -> Results:
    """Apply the formula chunk by chunk.

    Each chunk keeps its logits for the backward pass only where torch cannot recompute it: in transforms and in
    compiled code.
    """
    loss.check_formula(call)
    input, weight, bias = call[:HEAD_TENSORS]
    # Upcast once, so that the sums of their gradients over the chunks are rounded to 16 bits once, at the end.
    of_head = input, widen(weight), None if bias is None else widen(bias)
    call = loss.replace(call, of_head, loss.tensors(call))
    is_compiling = torch.compiler.is_compiling()
    is_traced = not is_compiling and (type(input.shape[0]) is not int or in_jit_trace())  # for other numbers of rows
    chunks = [slice(None)] if is_traced else loss.chunks(call)
    if len(chunks) == 1:
        return loss.formula(call)
    formula: Callable[[Any], Results] = loss.formula
    if torch.is_grad_enabled() and not (is_compiling or in_functorch_transform() or in_forward_ad()):
        formula = recomputed(loss.formula)
    parts: list[Results] = [formula(loss.rows_of(call, rows)) for rows in chunks]
    return tuple(torch.cat(list(column)) for column in zip(*parts, strict=True))


class _Function(torch.autograd.Function):
    """The results, or the total together with its gradients; never in a transform, so that ctx may hold them."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Results:
        loss: HeadLoss
        *_, loss, call, factors = args
        results, ctx.gradients = loss.reduce(call, factors)
        _save(ctx, loss, call, results, factors)
        if factors is None:
            differentiable = loss.differentiable(call)
            ctx.mark_non_differentiable(*(one for i, one in enumerate(results) if i not in differentiable))
            return results
        others = [results[i] for i in loss.beside_total(call)]
        ctx.mark_non_differentiable(*others)
        total: Tensor = loss.total(call, results, factors)
        return total, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        loss, made, needed = ctx.loss, ctx.gradients, ctx.needs_input_grad[:HEAD_TENSORS]
        ctx.gradients = None
        if torch.is_grad_enabled() or (not ctx.has_factors and any(map(_is_transformed, grads))):
            call, _, factors = _saved(ctx)
            made = _differentiable_gradients(loss, call, factors, needed, grads)
        elif not ctx.has_factors:
            call, results, _ = _saved(ctx)
            again = loss.backward_call(call, results)
            _, made = loss.reduce(again, loss.factors_of(call, grads))
        else:
            if made is None:  # the first backward pass consumed them
                call, _, factors = _saved(ctx)
                _, made = loss.reduce(call, factors)
            if is_batched(grads[0]):
                ctx.gradients = made  # not consumed: _scaled() is out of place then
            made = _scaled(made, grads[0])
        # Each to its tensor's dtype: ranks that share a vocabulary upcast the input, whose gradients they add up.
        pairs = zip(made, ctx.dtypes, strict=True)
        made = [one if one is None or one.dtype is dtype else one.to(dtype) for one, dtype in pairs]
        return *made, None, None, None


_apply: Callable[..., Results] = fast_apply(_Function)


def _scaled(made: Sequence[Tensor | None], grad_loss: Tensor) -> Sequence[Tensor | None]:
    """Multiply gradients by that of the loss: in-place, except under ``vmap`` and in forward-mode AD."""
    if _is_transformed(grad_loss):
        return [None if gradient is None else gradient * grad_loss for gradient in made]
    if not (values_are_readable(grad_loss) and grad_loss.item() == 1):
        for gradient in made:
            if gradient is not None:
                gradient.mul_(grad_loss)
    return made


def _is_transformed(grad: Tensor) -> bool:
    """Return whether a gradient is batched or has a tangent, which the kernels do not support."""
    return is_batched(grad) or has_tangent(grad)


def _save(ctx: Any, loss: HeadLoss, call: Any, results: Results, factors: Sequence[Tensor | None] | None) -> None:
    """Save all tensors where saved-tensor hooks see them; copies of those of inference mode, which autograd refuses."""
    tensors = loss.tensors(call)
    savable = [one.clone() if one is not None and one.is_inference() else one for one in tensors]
    ctx.loss, ctx.has_factors = loss, factors is not None
    ctx.dtypes = [None if one is None else one.dtype for one in call[:HEAD_TENSORS]]
    ctx.call = loss.replace(call, (None,) * HEAD_TENSORS, (None,) * len(tensors))
    others = results[: loss.number_of_saved] if factors is None else factors
    ctx.save_for_backward(*call[:HEAD_TENSORS], *savable, *others)


def _saved(ctx: Any) -> tuple[Any, Results, Sequence[Tensor | None] | None]:
    """Return the call with its tensors, its results if it has no factors, and the factors."""
    saved = ctx.saved_tensors
    end = HEAD_TENSORS + len(ctx.loss.tensors(ctx.call))
    call = ctx.loss.replace(ctx.call, saved[:HEAD_TENSORS], saved[HEAD_TENSORS:end])
    return call, () if ctx.has_factors else saved[end:], saved[end:] if ctx.has_factors else None


def _differentiable_gradients(
    loss: HeadLoss,
    call: Any,
    factors: Sequence[Tensor | None] | None,
    needed: Sequence[bool],
    grads: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Compute gradients that can be differentiated again; their graph holds the logits of all rows."""
    positions = [i for i, is_needed in enumerate(needed) if is_needed]

    def function(*of_head: Tensor) -> tuple[Tensor, ...]:
        results = _by_formula(loss, loss.replace(call, of_head, loss.tensors(call)))
        if factors is not None:
            return (loss.total(call, results, factors),)
        return tuple(results[i] for i in loss.differentiable(call))

    function_of_needed, values = as_function_of(function, call[:HEAD_TENSORS], positions)
    _, pull_back = vjp(function_of_needed, *values)
    cotangents = grads[:1] if factors is not None else [grads[i] for i in loss.differentiable(call)]
    return scatter(needed, pull_back(*cotangents))
