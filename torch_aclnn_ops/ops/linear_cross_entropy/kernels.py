"""Which kernels compute a linear cross entropy: the fused operators where they serve, else the chunks of rows.

The ``compute_`` functions run in eager mode. Traced, their loops over chunks would be unrolled for one number of rows,
so ``torch.compile`` takes each of them as one operator, which the ``compiled_`` functions call.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch_aclnn_ops._torch_compat import is_autocast_available, schema_of
from torch_aclnn_ops.ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops._paths import log_path
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
    MadeGradients,
    fused_gradients,
    fused_statistics,
    small_loss,
    why_not_fused,
)

import torch
from torch import Tensor

_NAME = "linear_cross_entropy"
_Result = TypeVar("_Result")


def _describe(problem: Problem, plan: Plan) -> str:
    return f"{plan}{describe_backend(problem.linear_weight, plan.rows)}"


def _describe_formula(problem: Problem, plan: Plan, how: str = "") -> str:
    return f"formula in torch calls, because {why_not_fused(problem)}; {how}{_describe(problem, plan)}"


def is_autocast_on(tensor: Tensor) -> bool:
    """Return whether autocast is on for a tensor's type of device."""
    device_type = tensor.device.type
    return (tensor.is_cpu or is_autocast_available(device_type)) and torch.is_autocast_enabled(device_type)


def _run_without_autocast(kernel: Callable[..., _Result], problem: Problem, *args: Any) -> _Result:
    """Run a kernel as written where autocast is on, which would make its matrix products 16-bit ones."""
    if is_autocast_on(problem.input):
        with torch.autocast(problem.input.device.type, enabled=False):
            return kernel(problem, *args)
    return kernel(problem, *args)


def compute_statistics(problem: Problem) -> Statistics:
    """Reduce the logits of every row."""
    if why_not_fused(problem) is None:
        return fused_statistics(problem)
    plan = problem.plan_statistics()
    log_path(_NAME, lambda: _describe_formula(problem, plan))
    return _run_without_autocast(chunks.statistics_in_chunks, problem, plan)


def compute_gradients(
    problem: Problem, grad_statistics: Statistics, log_sum_exp: Tensor, entropy: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Differentiate the statistics by input, weight and bias, as far as it is requested.

    Args:
        problem: the arguments.
        grad_statistics: the gradients of the statistics, and the maximum itself.
        log_sum_exp: the statistic.
        entropy: the statistic, if its gradient is given.
    """
    if grad_statistics.weighted is None and why_not_fused(problem) is None:
        # The operator makes both gradients or none.
        if all(problem.request.gradients[:2]):
            return *fused_gradients(problem, grad_statistics, log_sum_exp), None
        name = fused_linear_cross_entropy_loss_grad.name
        log_path(name, lambda: "formula in torch calls, because not both gradients are needed")
    plan = problem.plan_rows()
    log_path(_NAME, lambda: f"logits computed again for the gradients; {_describe(problem, plan)}")
    return _run_without_autocast(chunks.gradients_in_chunks, problem, grad_statistics, entropy, plan)


def compute_loss_and_gradients(
    problem: Problem, coefficients: Coefficients | PlainLoss
) -> tuple[Tensor, MadeGradients, Tensor | None]:
    """Compute the loss of all rows and its gradients by input, weight and bias; the fused operators do not serve."""
    plan = problem.plan_rows()
    log_path(_NAME, lambda: _describe_formula(problem, plan, "gradients made in the forward pass; "))
    if isinstance(coefficients, PlainLoss):
        made = _run_without_autocast(small_loss, problem, coefficients) if plan.has_room else None
        if made is not None:
            return *made, None
        problem, coefficients = coefficients.coefficients(problem)
    return _run_without_autocast(chunks.loss_in_chunks, problem, coefficients, plan)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_PROBLEM = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? class_weight, float? softcap,"
    " float temperature, SymInt? chunk_size, SymInt? max_memory, bool weighted, bool entropy, bool predicted_tokens,"
    " bool[] gradients"
)
_PROBLEM_ARGUMENTS = 13


def _define(signature: str, kernel: Any, fake: Any) -> Any:
    _library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    name = signature.partition("(")[0]
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.library.register_fake(overload, fake, lib=_library)
    return overload


def _problem(arguments: Sequence[Any]) -> Problem:
    """Return the problem whose arguments were made by :func:`flatten`."""
    weighted, entropy, predicted_tokens, gradients = arguments[9:_PROBLEM_ARGUMENTS]
    request = Request(weighted, entropy, predicted_tokens, tuple(gradients))
    return Problem._make((*arguments[:5], LogitOptions(*arguments[5:9]), request))


def flatten(problem: Problem) -> tuple[Any, ...]:
    """Return the arguments of an operator that describe a problem."""
    options, request = problem.options, problem.request
    return (
        *problem[:5],
        *(options.softcap, options.temperature, options.chunk_size, options.max_memory),
        *(request.weighted, request.entropy, request.predicted_tokens, request.gradients),
    )


def _given(like: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the tensors, with empty ones instead of ``None``."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def _select(tensors: Sequence[Tensor | None], is_selected: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the selected tensors, and ``None`` for the others."""
    return tuple(tensor if selected else None for tensor, selected in zip(tensors, is_selected, strict=True))


def _statistics_kernel(*args: Any) -> tuple[Tensor, ...]:
    problem = _problem(args)
    return _given(problem.input, compute_statistics(problem))


def _statistics_fake(*args: Any) -> tuple[Tensor, ...]:
    input, request = args[0], _problem(args).request
    dtype = accumulation_dtype(input.dtype)
    is_made = (True, True, True, request.weighted, request.entropy)
    values = [input.new_empty(input.shape[0] if made else 0, dtype=dtype) for made in is_made]
    return *values, input.new_empty(input.shape[0] if request.predicted_tokens else 0, dtype=torch.int64)


_statistics = _define(
    f"linear_cross_entropy_statistics({_PROBLEM}) -> (Tensor logits_max, Tensor log_sum_exp, Tensor predicted,"
    " Tensor weighted_sum, Tensor entropy_of_rows, Tensor tokens)",
    _statistics_kernel,
    _statistics_fake,
)


def _gradients_kernel(*args: Any) -> tuple[Tensor, ...]:
    problem = _problem(args)
    *grad_statistics, logits_max, log_sum_exp, entropy = args[_PROBLEM_ARGUMENTS:]
    made = compute_gradients(problem, Statistics(logits_max, *grad_statistics), log_sum_exp, entropy)
    return _given(problem.input, _select(made, problem.request.gradients))


def _gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(_problem(args), None)


_gradients = _define(
    f"linear_cross_entropy_gradients({_PROBLEM}, Tensor grad_log_sum_exp, Tensor grad_predicted, Tensor? grad_weighted,"
    " Tensor? grad_entropy, Tensor logits_max, Tensor log_sum_exp, Tensor? entropy_of_rows) -> (Tensor input_grad,"
    " Tensor weight_grad, Tensor bias_grad)",
    _gradients_kernel,
    _gradients_fake,
)


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_max, log_sum_exp, _, _, entropy, _ = output
    ctx.save_for_backward(*inputs[:5], logits_max, log_sum_exp, entropy)
    ctx.options, ctx.request = _problem(inputs)[5:]
    ctx.set_materialize_grads(True)


def _refuse_second_derivatives() -> None:
    """Raise where a backward pass is to be differentiated itself; AOTAutograd's own backward passes refuse before."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy: a compiled call must not be differentiated with create_graph=True, because its"
            " operators have a first derivative only; call it outside of torch.compile"
        )


def _differentiate_statistics(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_second_derivatives()
    *tensors, logits_max, log_sum_exp, entropy = ctx.saved_tensors
    needed = tuple(ctx.needs_input_grad[:3])
    weighted, has_entropy = ctx.request.weighted, ctx.request.entropy
    problem = Problem._make((*tensors, ctx.options, Request(False, has_entropy, False, needed)))
    selected = _select(grad_outputs[1:5], (True, True, weighted, has_entropy))
    results = _gradients(*flatten(problem), *selected, logits_max, log_sum_exp, entropy if has_entropy else None)
    return *_select(results, needed), *(None,) * (_PROBLEM_ARGUMENTS - 3)


torch.library.register_autograd(
    schema_of(_statistics).name, _differentiate_statistics, setup_context=_save_statistics, lib=_library
)


def _loss_and_gradients_kernel(*args: Any) -> tuple[Tensor, ...]:
    problem = _problem(args)
    made: Any
    loss, made, tokens = compute_loss_and_gradients(problem, Coefficients(*args[_PROBLEM_ARGUMENTS:]))
    dtype = _held_dtype(problem)
    held = [None if gradient is None else gradient.to(dtype) for gradient in _select(made, problem.request.gradients)]
    return loss, *_given(problem.input, held), *_given(problem.target, [tokens])


def _loss_and_gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    problem = _problem(args)
    input, has_tokens = problem.input, problem.request.predicted_tokens
    return (
        input.new_empty((), dtype=accumulation_dtype(input.dtype)),
        *_empty_gradients(problem, _held_dtype(problem)),
        input.new_empty(input.shape[0] if has_tokens else 0, dtype=torch.int64),
    )


_loss_and_gradients = _define(
    f"linear_cross_entropy_loss_and_gradients({_PROBLEM}, Tensor log_sum_exp, Tensor predicted, Tensor? weighted_sum,"
    " Tensor? square) -> (Tensor loss, Tensor input_grad, Tensor weight_grad, Tensor bias_grad, Tensor tokens)",
    _loss_and_gradients_kernel,
    _loss_and_gradients_fake,
)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype, ctx.number = inputs[0].dtype, len(inputs)
    ctx.save_for_backward(*output[1:4])


def _scale_gradients(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    _refuse_second_derivatives()
    scaled = [(gradient * grad_loss).to(ctx.dtype) for gradient in ctx.saved_tensors]
    return *_select(scaled, ctx.needs_input_grad[:3]), *(None,) * (ctx.number - 3)


torch.library.register_autograd(
    schema_of(_loss_and_gradients).name, _scale_gradients, setup_context=_save_gradients, lib=_library
)


def compiled_statistics(problem: Problem) -> Statistics:
    """Reduce the logits of every row in compiled code."""
    results, request = _statistics(*flatten(problem)), problem.request
    is_made = (True, True, True, request.weighted, request.entropy, request.predicted_tokens)
    return Statistics(*_select(results, is_made))  # type: ignore[arg-type]


def compiled_loss(problem: Problem, coefficients: Coefficients) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of all rows in compiled code, and its gradients with it."""
    loss, *_, tokens = _loss_and_gradients(*flatten(problem), *coefficients)
    return loss, tokens if problem.request.predicted_tokens else None


def _empty_gradients(problem: Problem, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    return tuple(
        problem.input.new_empty(0)
        if argument is None or not is_needed
        else argument.new_empty(argument.shape, dtype=dtype or argument.dtype)
        for argument, is_needed in zip(problem[:3], problem.request.gradients, strict=True)
    )


def _held_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of gradients that wait for the loss's own: float16 could not hold what a scaler will enlarge."""
    return torch.float32 if problem.input.dtype == torch.float16 else problem.input.dtype
