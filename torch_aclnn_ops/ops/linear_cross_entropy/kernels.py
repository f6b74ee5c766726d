"""Which kernels compute a linear cross entropy: the fused operators where they serve, else the chunks of rows.

The ``compute_`` functions run in eager mode. Traced, their loops over chunks would be unrolled for one number of rows,
so ``torch.compile`` takes each of them as one operator, which the ``compiled_`` functions call.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops.ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops._paths import log_path
from torch_aclnn_ops.ops._raw_function import scatter
from torch_aclnn_ops.ops._raw_operator import NAMESPACE
from torch_aclnn_ops.ops.linear_cross_entropy import chunks
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.plan import LogitOptions, Plan
from torch_aclnn_ops.ops.linear_cross_entropy.problem import (
    Coefficients,
    PlainLoss,
    Problem,
    Request,
    Statistics,
)
from torch_aclnn_ops.ops.linear_cross_entropy.products import describe_backend
from torch_aclnn_ops.ops.linear_cross_entropy.shortcuts import (
    fused_gradients,
    fused_statistics,
    small_loss_on_cpu,
    small_loss_on_npu,
    why_not_fused,
)

import torch
from torch import Tensor

_NAME = "linear_cross_entropy"


def _describe(problem: Problem, plan: Plan) -> str:
    return f"{plan}{describe_backend(problem.linear_weight, plan.rows)}"


def _log_formula(problem: Problem, how: str = "", make_plan: Callable[[Problem], Plan] = Problem.plan_rows) -> None:
    def describe() -> str:
        text = _describe(problem, make_plan(problem))
        return f"formula in torch calls, because {why_not_fused(problem)}; {how}{text}"

    log_path(_NAME, describe)


def _check_queue(problem: Problem) -> None:
    """Raise where torch_npu drops what the kernels in torch calls would ask of it."""
    if problem.input.device.type == "npu":
        _extension.check_queue(_NAME)


def compute_statistics(problem: Problem) -> Statistics:
    """Reduce the logits of every row."""
    if why_not_fused(problem) is None:
        return fused_statistics(problem)
    _check_queue(problem)
    _log_formula(problem, make_plan=Problem.plan_statistics)
    return chunks.statistics_in_chunks(problem)


def compute_gradients(
    problem: Problem, grad_statistics: Statistics, log_sum_exp: Tensor, entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Differentiate the statistics by input, weight and bias, as far as it is requested.

    ``grad_statistics`` has the maximum itself, and ``entropy`` is the statistic, if its gradient is given.
    """
    if grad_statistics.weighted is None and why_not_fused(problem) is None:
        # The operator makes both gradients or none.
        if all(problem.request.gradients[:2]):
            return *fused_gradients(problem, grad_statistics, log_sum_exp), None
        name = fused_linear_cross_entropy_loss_grad.name
        log_path(name, lambda: "formula in torch calls, because not both gradients are needed")
    _check_queue(problem)
    log_path(_NAME, lambda: f"logits computed again for the gradients; {_describe(problem, problem.plan_rows())}")
    return chunks.gradients_in_chunks(problem, grad_statistics, entropy)


def compute_loss_and_gradients(
    problem: Problem, coefficients: Coefficients | PlainLoss
) -> tuple[Tensor | None, Sequence[Tensor | None], Tensor | None]:
    """Compute the loss of all rows and its gradients by input, weight and bias; the fused operators do not serve."""
    _check_queue(problem)
    _log_formula(problem, "gradients made in the forward pass; ")
    if isinstance(coefficients, PlainLoss):
        return *small_loss_on_cpu(problem, coefficients), None
    return chunks.loss_in_chunks(problem, coefficients)


def compute_small_loss(problem: Problem, loss: PlainLoss) -> Tensor | None:
    """Compute a small loss on an NPU, where autograd differentiates it; ``None`` where that is not possible."""
    _log_formula(problem, "all logits at once; ")
    return small_loss_on_npu(problem, loss)


_PROBLEM = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? class_weight, float? softcap,"
    " float temperature, SymInt? chunk_size, SymInt? max_memory, bool is_shard, bool weighted, bool entropy,"
    " bool predicted_tokens, bool[] gradients"
)
_PROBLEM_ARGUMENTS = 14


def _problem(arguments: Sequence[Any]) -> Problem:
    """Return the problem whose arguments were made by :func:`flatten`."""
    weighted, entropy, predicted_tokens, gradients = arguments[10:_PROBLEM_ARGUMENTS]
    request = Request(weighted, entropy, predicted_tokens, tuple(gradients))
    return Problem._make((*arguments[:5], LogitOptions(*arguments[5:10]), request))


def flatten(problem: Problem) -> tuple[Any, ...]:
    """Return the arguments of an operator that describe a problem."""
    options, request = problem.options, problem.request
    return (
        *problem[:5],
        *(options.softcap, options.temperature, options.chunk_size, options.max_memory, options.is_shard),
        *(request.weighted, request.entropy, request.predicted_tokens, request.gradients),
    )


@torch.library.custom_op(
    f"{NAMESPACE}::linear_cross_entropy_statistics", mutates_args=(), schema=f"({_PROBLEM}) -> Tensor[]"
)
def _statistics(*args: Any) -> list[Tensor]:
    problem = _problem(args)
    if any(problem.request.gradients):
        problem.plan_rows()  # too little memory for the backward pass is refused now
    return [result for result in compute_statistics(problem) if result is not None]


@_statistics.register_fake
def _statistics_fake(*args: Any) -> list[Tensor]:
    input, request = args[0], _problem(args).request
    dtypes = [accumulation_dtype(input.dtype)] * (1 + request.differentiable) + [torch.int64] * request.predicted_tokens
    return [input.new_empty(input.shape[0], dtype=dtype) for dtype in dtypes]


@torch.library.custom_op(
    f"{NAMESPACE}::linear_cross_entropy_gradients",
    mutates_args=(),
    schema=f"({_PROBLEM}, Tensor grad_log_sum_exp, Tensor grad_predicted, Tensor? grad_weighted, Tensor? grad_entropy,"
    " Tensor logits_max, Tensor log_sum_exp, Tensor? entropy_of_rows) -> Tensor[]",
)
def _gradients(*args: Any) -> list[Any]:
    problem = _problem(args)
    *grad_statistics, logits_max, log_sum_exp, entropy = args[_PROBLEM_ARGUMENTS:]
    made = compute_gradients(problem, Statistics(logits_max, *grad_statistics), log_sum_exp, entropy)
    return list(compress(made, problem.request.gradients))


@_gradients.register_fake
def _gradients_fake(*args: Any) -> list[Tensor]:
    needed = compress(args, _problem(args).request.gradients)
    return [argument.new_empty(argument.shape) for argument in needed]


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.options, ctx.request = _problem(inputs)[5:]
    reduced = ctx.request.name(output)
    ctx.save_for_backward(*inputs[:5], reduced.logits_max, reduced.log_sum_exp, reduced.entropy)
    ctx.set_materialize_grads(True)


def _refuse_second_derivatives() -> None:
    """Raise where a backward pass is to be differentiated itself; AOTAutograd's own backward passes refuse before."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy: a compiled call must not be differentiated with create_graph=True, because its"
            " operators have a first derivative only; call it outside of torch.compile"
        )


def _differentiate_statistics(ctx: Any, grad_outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    _refuse_second_derivatives()
    *tensors, logits_max, log_sum_exp, entropy = ctx.saved_tensors
    needed = tuple(ctx.needs_input_grad[:3])
    problem = Problem._make((*tensors, ctx.options, Request(False, ctx.request.entropy, False, needed)))
    grad_statistics = ctx.request.name(grad_outputs)[1:5]
    results = _gradients(*flatten(problem), *grad_statistics, logits_max, log_sum_exp, entropy)
    return *scatter(needed, results), *(None,) * (_PROBLEM_ARGUMENTS - len(needed))


_statistics.register_autograd(_differentiate_statistics, setup_context=_save_statistics)


@torch.library.custom_op(
    f"{NAMESPACE}::linear_cross_entropy_loss_and_gradients",
    mutates_args=(),
    schema=f"({_PROBLEM}, Tensor log_sum_exp, Tensor predicted, Tensor? weighted_sum, Tensor? square) -> Tensor[]",
)
def _loss_and_gradients(*args: Any) -> list[Any]:
    problem = _problem(args)
    problem.plan_rows()  # too little memory is refused for all rows, as in eager mode
    made: Any
    loss, made, tokens = compute_loss_and_gradients(problem, Coefficients(*args[_PROBLEM_ARGUMENTS:]))
    held = [gradient.to(_held_dtype(problem)) for gradient in compress(made, problem.request.gradients)]
    return [loss, *held] if tokens is None else [loss, *held, tokens]


@_loss_and_gradients.register_fake
def _loss_and_gradients_fake(*args: Any) -> list[Tensor]:
    problem = _problem(args)
    input, request = problem.input, problem.request
    needed = compress(args, request.gradients)
    return [
        input.new_empty((), dtype=accumulation_dtype(input.dtype)),
        *(argument.new_empty(argument.shape, dtype=_held_dtype(problem)) for argument in needed),
        *[input.new_empty(input.shape[0], dtype=torch.int64)] * request.predicted_tokens,
    ]


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.dtype, ctx.number, ctx.needed = inputs[0].dtype, len(inputs), _problem(inputs).request.gradients
    ctx.save_for_backward(*output[1 : 1 + sum(ctx.needed)])


def _scale_gradients(ctx: Any, grad_outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    _refuse_second_derivatives()
    scaled = [(gradient * grad_outputs[0]).to(ctx.dtype) for gradient in ctx.saved_tensors]
    return *scatter(ctx.needed, scaled), *(None,) * (ctx.number - len(ctx.needed))


_loss_and_gradients.register_autograd(_scale_gradients, setup_context=_save_gradients)


def compiled_statistics(problem: Problem) -> Statistics:
    """Reduce the logits of every row in compiled code."""
    return problem.request.name(_statistics(*flatten(problem)))


def compiled_loss(problem: Problem, coefficients: Coefficients) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of all rows in compiled code, and its gradients with it."""
    loss, *others = _loss_and_gradients(*flatten(problem), *coefficients)
    return loss, others[-1] if problem.request.predicted_tokens else None


def _held_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of gradients that wait for the loss's own: float16 could not hold what a scaler will enlarge."""
    return torch.float32 if problem.input.dtype == torch.float16 else problem.input.dtype
