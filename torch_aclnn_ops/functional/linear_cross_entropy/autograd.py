"""Derivatives: of the statistics of every row, and of a scalar loss whose gradients are made in the forward pass."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch_aclnn_ops._torch_compat import is_legacy_batchedtensor
from torch_aclnn_ops.functional.linear_cross_entropy.formula import RowFunction, statistics_of_rows
from torch_aclnn_ops.ops._checks import values_are_readable
from torch_aclnn_ops.ops._derivatives import in_functorch_transform, is_batched, is_differentiated, vjp
from torch_aclnn_ops.ops._differentiable import EagerOrCompiled
from torch_aclnn_ops.ops._paths import log_path
from torch_aclnn_ops.ops.linear_cross_entropy import kernels
from torch_aclnn_ops.ops.linear_cross_entropy.plan import LogitOptions
from torch_aclnn_ops.ops.linear_cross_entropy.problem import (
    Coefficients,
    PlainLoss,
    Problem,
    Request,
    Statistics,
    cross_entropies,
    z_losses,
)
from torch_aclnn_ops.ops.linear_cross_entropy.shortcuts import why_not_fused

import torch
from torch import Tensor
from torch.autograd import forward_ad

# input, linear_weight, linear_bias, target, class_weight
_BY_ROW = (True, False, False, True, False)
_TENSORS = len(_BY_ROW)
_KERNELS_DIFFERENTIATE = 3  # the first arguments


def statistics(problem: Problem) -> Statistics:
    """Reduce the logits of every row, with every derivative.

    Returns:
        The statistics that are requested in float32, or float64 for float64 inputs.
    """
    return problem.request.name(_differentiable_statistics(*problem))


def _formula(options: LogitOptions, request: Request) -> RowFunction:
    """Return all statistics as a function of rows."""
    function = partial(statistics_of_rows, options=options, request=request)
    return RowFunction(function, _BY_ROW, (True,) * (1 + request.differentiable + request.predicted_tokens))


def _differentiable_formula(options: LogitOptions, request: Request) -> RowFunction:
    """Return the statistics that have derivatives as a function of rows."""
    function = partial(statistics_of_rows, options=options, request=Request(request.weighted, request.entropy))
    return RowFunction(lambda *args: function(*args)[1:], _BY_ROW, (True,) * request.differentiable)


def _by_formula(*args: Any) -> tuple[Tensor, ...]:
    problem = Problem(*args)
    return _formula(problem.options, problem.request)(problem[:5], problem.plan_rows().chunks())


class StatisticsFunction(torch.autograd.Function):
    """The statistics, with the kernels for the forward and the first backward pass, and the formula for the others.

    Its arguments are those of a :class:`Problem`, its results the statistics that are requested.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Reduce the logits."""
        if _is_any_batched(args):
            log_path("linear_cross_entropy", lambda: "formula in torch calls, because vmap runs over it")
            return _by_formula(*args)
        return tuple(result for result in kernels.compute_statistics(Problem(*args)) if result is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what the derivatives need."""
        *tensors, ctx.options, ctx.request = inputs
        reduced = ctx.request.name(output)
        # One call: a second one would replace the first.
        constants = (reduced.logits_max, reduced.predicted_tokens)
        ctx.mark_non_differentiable(*(constant for constant in constants if constant is not None))
        saved = (*tensors, reduced.logits_max, reduced.log_sum_exp, reduced.entropy)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)  # functorch wants the same tensors for both

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate by the arguments that need it."""
        positions = frozenset(i for i in range(_TENSORS) if ctx.needs_input_grad[i])  # to functorch, not a tree
        grad_statistics = grad_outputs[1 : 1 + ctx.request.differentiable]
        found = iter(_statistics_backward(*grad_statistics, *ctx.saved_tensors, ctx.options, ctx.request, positions))
        return tuple(next(found) if i in positions else None for i in range(len(ctx.needs_input_grad)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Push tangents forward."""
        tensors = ctx.saved_tensors[:_TENSORS]
        positions, given = _present(tangents[:_TENSORS])
        formula = _differentiable_formula(ctx.options, ctx.request)
        results = formula.jvp(tensors, positions, given, _chunks(tensors, ctx.options))
        return None, *results, *(None,) * ctx.request.predicted_tokens


class _StatisticsBackwardFunction(torch.autograd.Function):
    """The gradients as a function of those of the statistics and of the tensors, which can be differentiated itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        grad_statistics, tensors, (logits_max, log_sum_exp, entropy), (options, request, positions) = _split(args)
        if max(positions) < _KERNELS_DIFFERENTIATE and not _is_any_batched(args):
            needed = (0 in positions, 1 in positions, 2 in positions)
            named = Request(request.weighted, request.entropy).name((logits_max, *grad_statistics))
            problem = Problem._make((*tensors, options, Request(entropy=request.entropy, gradients=needed)))
            found = kernels.compute_gradients(problem, named, log_sum_exp, entropy)
            results: tuple[Any, ...] = tuple(found[position] for position in sorted(positions))
            return results
        return _gradients_by_formula(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.options, ctx.request, ctx.positions = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        args, function, chunks = _gradients_as_a_function(ctx)
        positions = [i for i in range(len(args)) if ctx.needs_input_grad[i]]
        found = iter(function.vjp(args, positions, grad_outputs, chunks))
        return tuple(next(found) if i in positions else None for i in range(len(ctx.needs_input_grad)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        args, function, chunks = _gradients_as_a_function(ctx)
        positions, given = _present(tangents[: len(args)])
        found = function.jvp(args, positions, given, chunks)
        arguments = (args[ctx.request.differentiable + position] for position in sorted(ctx.positions))
        return tuple(gradient.to(argument.dtype) for gradient, argument in zip(found, arguments, strict=True))


def _split(args: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """Return the gradients of the statistics, the tensors of the problem, the saved statistics, and the constants."""
    end = args[-2].differentiable
    return args[:end], args[end : end + _TENSORS], args[end + _TENSORS : -3], args[-3:]


def _gradients_by_formula(*args: Any) -> tuple[Tensor, ...]:
    grad_statistics, tensors, _, (options, request, positions) = _split(args)
    formula = _differentiable_formula(options, request)
    return formula.vjp(tensors, sorted(positions), grad_statistics, _chunks(tensors, options))


def _gradients_as_a_function(ctx: Any) -> tuple[Sequence[Any], RowFunction, list[slice]]:
    """Return the arguments of the gradients, the gradients as a function of them, and the chunks of rows.

    The saved statistics are no arguments: the function computes them again, as what they are, functions of the others.
    """
    number = ctx.request.differentiable
    args = ctx.saved_tensors[: number + _TENSORS]
    formula, positions = _differentiable_formula(ctx.options, ctx.request), sorted(ctx.positions)

    def gradients(*args: Any) -> tuple[Tensor, ...]:
        _, pull_back = formula.linearize(args[number:], positions)
        results: tuple[Tensor, ...] = pull_back(*args[:number])
        return results

    by_row = (*(True,) * number, *_BY_ROW)
    function = RowFunction(gradients, by_row, [_BY_ROW[position] for position in positions])
    return args, function, _chunks(args[number:], ctx.options)


def _chunks(tensors: Sequence[Any], options: LogitOptions) -> list[slice]:
    return Problem._make((*tensors, options, Request())).plan_rows().chunks()


def _present(tangents: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    present = [(i, tangent) for i, tangent in enumerate(tangents) if tangent is not None]
    return [i for i, _ in present], [tangent for _, tangent in present]


def _is_any_batched(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, Tensor) and is_batched(arg) for arg in args)


def _in_compiled_code(*args: Any) -> Sequence[Any]:
    if in_functorch_transform() or any(map(is_differentiated, args[_KERNELS_DIFFERENTIATE:_TENSORS])):
        # Dynamo takes all but the first derivative of a Function for zero; the operators have a first one only.
        return _by_formula(*args)
    return [result for result in kernels.compiled_statistics(Problem(*args)) if result is not None]


_differentiable_statistics = EagerOrCompiled(StatisticsFunction, _by_formula, _in_compiled_code)
_statistics_backward = EagerOrCompiled(_StatisticsBackwardFunction, _gradients_by_formula)


def makes_gradients_in_forward(problem: Problem, token_weight: Tensor | None) -> bool:
    """Return whether a scalar loss is to be computed together with its gradients.

    It is not inside transforms, for derivatives by other arguments, and where the fused operators serve.
    """
    if True not in problem.request.gradients or in_functorch_transform():
        return False
    is_compiling = torch.compiler.is_compiling()
    for tensor in (*problem[:5], token_weight):
        if tensor is None:
            continue
        if not is_compiling and (is_legacy_batchedtensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None):
            return False
    for tensor in (problem.target, problem.class_weight, token_weight):
        if tensor is not None and tensor.requires_grad:
            return False
    return why_not_fused(problem) is not None


def loss(problem: Problem, coefficients: Coefficients | PlainLoss) -> tuple[Tensor, Tensor | None]:
    """Compute the sum of all rows' losses together with its gradients: three matrix products, not four.

    The first backward pass takes the gradients. One that follows it, or one that is to be differentiated itself,
    computes the logits again. The predicted tokens are returned if they are requested.
    """
    if torch.compiler.is_compiling() and isinstance(coefficients, Coefficients):
        return kernels.compiled_loss(problem, coefficients)
    apply: Any = _LossFunction.apply
    value, tokens = apply(*problem[:3], problem, coefficients)
    return value, tokens


class _LossFunction(torch.autograd.Function):
    """The loss; never inside of a transform, so a context can hold the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: Problem,
        coefficients: Coefficients | PlainLoss,
    ) -> tuple[Tensor, Tensor | None]:
        # The tensors come from save_for_backward, where hooks see them.
        if isinstance(coefficients, PlainLoss):
            ctx.save_for_backward(*problem[:5])
            ctx.plain = coefficients
        else:
            ctx.save_for_backward(*problem[:5], *coefficients)
            ctx.plain = None
        ctx.options, ctx.dtype = problem.options, weight.dtype
        value, ctx.gradients, tokens = kernels.compute_loss_and_gradients(problem, coefficients)
        if tokens is not None:
            ctx.mark_non_differentiable(tokens)
        return value, tokens

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        made, ctx.gradients = ctx.gradients, None
        if made is None or torch.is_grad_enabled():
            saved: Any = ctx.saved_tensors
            problem, coefficients = Problem._make((*saved[:_TENSORS], ctx.options, Request())), saved[_TENSORS:]
            if ctx.plain is not None:
                problem, coefficients = ctx.plain.coefficients(problem)
            made = _recomputed(problem, Coefficients(*coefficients), ctx.needs_input_grad[:3], grad_loss)
        elif callable(made) and not is_batched(grad_loss):
            made = made(grad_loss)
        elif is_batched(grad_loss):
            made = made(ctx.saved_tensors[0].new_ones(())) if callable(made) else made
            ctx.gradients = made  # each sample's are a product of their own
            made = [None if gradient is None else gradient * grad_loss for gradient in made]
        elif not (values_are_readable(grad_loss) and grad_loss.item() == 1):
            for gradient in made:
                if gradient is not None:
                    gradient.mul_(grad_loss)
        input_grad, weight_grad, bias_grad = made
        if ctx.dtype in (torch.float16, torch.bfloat16):
            input_grad, weight_grad, bias_grad = (
                None if gradient is None else gradient.to(ctx.dtype) for gradient in made
            )
        return input_grad, weight_grad, bias_grad, None, None


def _recomputed(
    problem: Problem, coefficients: Coefficients, needed: Sequence[bool], grad_loss: Tensor
) -> Sequence[Tensor | None]:
    """Differentiate the loss as a function that can be differentiated again."""
    names = [name for name, is_needed in zip(Problem._fields, needed, strict=False) if is_needed]
    problem = problem._replace(request=Request(weighted=coefficients.weighted is not None))

    def sum_of_losses(*values: Tensor) -> tuple[Tensor]:
        reduced = statistics(problem._replace(**dict[str, Any](zip(names, values, strict=True))))
        losses = cross_entropies(reduced, coefficients)
        if coefficients.square is not None:
            losses = losses + z_losses(reduced, coefficients)
        return (losses.sum(),)

    _, pull_back = vjp(sum_of_losses, *(getattr(problem, name) for name in names))
    found = iter(pull_back(grad_loss))
    return [next(found) if is_needed else None for is_needed in needed]
