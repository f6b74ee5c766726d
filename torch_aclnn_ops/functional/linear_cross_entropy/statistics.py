"""The statistics of every row's logits as a function with every derivative."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch_aclnn_ops.functional.linear_cross_entropy.rows import RowFunction, statistics_of_rows
from torch_aclnn_ops.ops._derivatives import (
    in_functorch_transform,
    in_nested_forward_mode,
    is_batched,
    is_differentiated,
)
from torch_aclnn_ops.ops._paths import log_path
from torch_aclnn_ops.ops.linear_cross_entropy import _kernels, chunked
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Options
from torch_aclnn_ops.ops.linear_cross_entropy._problem import Problem, Statistics

import torch
from torch import Tensor

# input, linear_weight, linear_bias, target, class_weight
_BY_ROW = (True, False, False, True, False)
_TENSORS = len(_BY_ROW)
_OF_KERNELS = frozenset((0, 1, 2))  # the arguments that the kernels differentiate by


@dataclass(frozen=True)
class _Asked:
    """The options of a call and the statistics asked for; to functorch a constant."""

    options: Options
    weighted: bool
    entropy: bool
    predicted_tokens: bool

    @property
    def differentiable(self) -> int:
        """The number of statistics that have derivatives."""
        return 2 + self.weighted + self.entropy

    def problem(self, tensors: Sequence[Any]) -> Problem:
        """Return the arguments of the kernels."""
        input, linear_weight, linear_bias, target, class_weight = tensors
        return Problem(input, linear_weight, linear_bias, target, class_weight, self.options, self.entropy)

    def name(self, results: Sequence[Any]) -> Statistics:
        """Return the results by their names; those that were not asked for are ``None``."""
        logits_max, log_sum_exp, predicted, *others = results
        remaining = iter(others)
        asked = (self.weighted, self.entropy, self.predicted_tokens)
        return Statistics(
            logits_max, log_sum_exp, predicted, *(next(remaining) if is_asked else None for is_asked in asked)
        )

    def chunks(self, tensors: Sequence[Any]) -> list[slice]:
        """Cut the rows for the formula."""
        return self.problem(tensors).plan().chunks()

    def formula(self) -> RowFunction:
        """Return all statistics as a function of rows."""
        function = partial(
            statistics_of_rows,
            softcap=self.options.softcap,
            temperature=self.options.temperature,
            weighted=self.weighted,
            entropy=self.entropy,
            predicted_tokens=self.predicted_tokens,
        )
        return RowFunction(function, _BY_ROW, (True,) * (1 + self.differentiable + self.predicted_tokens))

    def differentiable_formula(self) -> RowFunction:
        """Return the statistics that have derivatives as a function of rows."""
        formula = replace(self, predicted_tokens=False).formula().function
        return RowFunction(lambda *args: formula(*args)[1:], _BY_ROW, (True,) * self.differentiable)


def statistics(problem: Problem, weighted: bool = False, predicted_tokens: bool = False) -> Statistics:
    """Reduce the logits of every row.

    Args:
        problem: the arguments, and whether the entropy is asked for.
        weighted: whether the sum of a row's logits is.
        predicted_tokens: whether the classes of the largest logits are.

    Returns:
        The statistics in float32, or float64 for float64 inputs.
    """
    asked = _Asked(problem.options, weighted, problem.entropy, predicted_tokens)
    tensors = (problem.input, problem.linear_weight, problem.linear_bias, problem.target, problem.class_weight)
    if not torch.compiler.is_compiling():
        if in_nested_forward_mode():
            return asked.name(asked.formula()(tensors, asked.chunks(tensors)))
        apply: Any = StatisticsFunction.apply
        return asked.name(apply(*tensors, asked))
    if in_functorch_transform() or any(map(is_differentiated, tensors[3:])):
        # Dynamo takes all but the first derivative of a Function for zero; the operators have a first one only.
        return asked.name(asked.formula()(tensors, asked.chunks(tensors)))
    return chunked.statistics(problem, weighted, predicted_tokens)


class StatisticsFunction(torch.autograd.Function):
    """The statistics, with the kernels for the forward and the first backward pass, and the formula for the others.

    Its arguments are the five tensors of a problem and what is asked for, its results the statistics asked for.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Reduce the logits."""
        tensors: Sequence[Any] = args[:-1]
        asked: _Asked = args[-1]
        if _is_any_batched(tensors):
            log_path("linear_cross_entropy", lambda: "formula in torch calls, because vmap runs over it")
            return asked.formula()(tensors, asked.chunks(tensors))
        reduced = _kernels.statistics(asked.problem(tensors), asked.weighted, asked.predicted_tokens)
        return tuple(result for result in reduced if result is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what the derivatives need."""
        *tensors, ctx.asked = inputs
        reduced = ctx.asked.name(output)
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
        cotangents = grad_outputs[1 : 1 + ctx.asked.differentiable]
        differentiate: Any = _StatisticsBackwardFunction.apply
        gradients = iter(differentiate(*cotangents, *ctx.saved_tensors, ctx.asked, positions))
        return tuple(next(gradients) if i in positions else None for i in range(len(ctx.needs_input_grad)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Push tangents forward."""
        tensors, asked = ctx.saved_tensors[:_TENSORS], ctx.asked
        positions, given = _present(tangents[:_TENSORS])
        results = asked.differentiable_formula().jvp(tensors, positions, given, asked.chunks(tensors))
        return None, *results, *(None,) * asked.predicted_tokens


class _StatisticsBackwardFunction(torch.autograd.Function):
    """The gradients as a function of the cotangents and the tensors, one that can be differentiated itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        tensors: Sequence[Any] = args[:-2]
        asked: _Asked = args[-2]
        positions: frozenset[int] = args[-1]
        cotangents, (*problem_tensors, logits_max, log_sum_exp, entropy) = _split(tensors, asked)
        if positions <= _OF_KERNELS and not _is_any_batched(tensors):
            named = replace(asked, predicted_tokens=False).name((logits_max, *cotangents))
            needed = [position in positions for position in sorted(_OF_KERNELS)]
            results: Sequence[Any] = _kernels.gradients(
                asked.problem(problem_tensors), named, log_sum_exp, entropy, needed
            )
            return tuple(results[position] for position in sorted(positions))
        formula = asked.differentiable_formula()
        return formula.vjp(problem_tensors, sorted(positions), cotangents, asked.chunks(problem_tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.asked, ctx.positions = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        args, function, chunks = _prepare(ctx)
        positions = [i for i in range(len(args)) if ctx.needs_input_grad[i]]
        gradients = iter(function.vjp(args, positions, grad_outputs, chunks))
        used = [i in positions for i in range(len(ctx.needs_input_grad))]
        return tuple(next(gradients) if is_used else None for is_used in used)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        args, function, chunks = _prepare(ctx)
        positions, given = _present(tangents[: len(args)])
        gradients = function.jvp(args, positions, given, chunks)
        like = (args[ctx.asked.differentiable + position] for position in sorted(ctx.positions))
        return tuple(gradient.to(arg.dtype) for gradient, arg in zip(gradients, like, strict=True))


def _split(tensors: Sequence[Any], asked: _Asked) -> tuple[Sequence[Tensor], Sequence[Any]]:
    return tensors[: asked.differentiable], tensors[asked.differentiable :]


def _prepare(ctx: Any) -> tuple[Sequence[Any], RowFunction, list[slice]]:
    """Return the arguments of the gradients, the gradients as a function of them, and the chunks of rows.

    The saved statistics are no arguments: the function computes them again, as what they are, functions of the others.
    """
    cotangents, saved = _split(ctx.saved_tensors, ctx.asked)
    tensors = saved[:_TENSORS]
    formula, ordered = ctx.asked.differentiable_formula(), sorted(ctx.positions)

    def gradients(*args: Any) -> tuple[Tensor, ...]:
        of_rows, arguments = _split(args, ctx.asked)
        _, pull_back = formula.linearize(arguments, ordered)
        results: tuple[Tensor, ...] = pull_back(*of_rows)
        return results

    by_row = (*(True,) * len(cotangents), *_BY_ROW)
    function = RowFunction(gradients, by_row, [_BY_ROW[position] for position in ordered])
    return (*cotangents, *tensors), function, ctx.asked.chunks(tensors)


def _present(tangents: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    present = [(i, tangent) for i, tangent in enumerate(tangents) if tangent is not None]
    return [i for i, _ in present], [tangent for _, tangent in present]


def _is_any_batched(tensors: Sequence[Any]) -> bool:
    return any(isinstance(tensor, Tensor) and is_batched(tensor) for tensor in tensors)
