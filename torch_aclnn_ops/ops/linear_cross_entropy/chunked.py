"""The kernels of the linear cross entropy as operators that ``torch.compile`` takes as they are.

Traced, their loops over chunks would be unrolled for one number of rows. A result that was not asked for has no
elements. Only compiled code calls them; in eager mode :mod:`torch_aclnn_ops.functional.linear_cross_entropy` calls the
kernels, with derivatives of every order.
"""

from collections.abc import Sequence
from typing import Any

from torch_aclnn_ops._torch_compat import schema_of
from torch_aclnn_ops.ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops._raw_operator import NAMESPACE
from torch_aclnn_ops.ops.linear_cross_entropy import _kernels
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Options
from torch_aclnn_ops.ops.linear_cross_entropy._problem import Coefficients, Problem, Statistics

import torch
from torch import Tensor

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_PROBLEM = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? class_weight, float? softcap,"
    " float temperature, SymInt? chunk_size, SymInt? max_memory, bool entropy"
)


def _define(signature: str, kernel: Any, fake: Any) -> Any:
    _library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    name = signature.partition("(")[0]
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.library.register_fake(overload, fake, lib=_library)
    return overload


def _problem(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    softcap: float | None,
    temperature: float,
    chunk_size: int | None,
    max_memory: int | None,
    entropy: bool,
) -> Problem:
    options = Options(softcap, temperature, chunk_size, max_memory)
    return Problem(input, linear_weight, linear_bias, target, class_weight, options, entropy)


def _flat(problem: Problem) -> tuple[Any, ...]:
    options = problem.options
    return (
        *(problem.input, problem.linear_weight, problem.linear_bias, problem.target, problem.class_weight),
        *(options.softcap, options.temperature, options.chunk_size, options.max_memory, problem.entropy),
    )


def _given(like: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the tensors, with empty ones instead of ``None``."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def _asked(tensors: Sequence[Tensor | None], asked: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the tensors that are asked for, and ``None`` for the others."""
    return tuple(tensor if is_asked else None for tensor, is_asked in zip(tensors, asked, strict=True))


def _statistics_kernel(*args: Any) -> tuple[Tensor, ...]:
    *arguments, weighted, predicted_tokens = args
    problem = _problem(*arguments)
    return _given(problem.input, _kernels.statistics(problem, weighted, predicted_tokens))


def _statistics_fake(*args: Any) -> tuple[Tensor, ...]:
    *arguments, weighted, predicted_tokens = args
    problem = _problem(*arguments)
    rows = problem.input.shape[0]
    values = [
        problem.input.new_empty(rows if is_asked else 0, dtype=accumulation_dtype(problem.input.dtype))
        for is_asked in (True, True, True, weighted, problem.entropy)
    ]
    return *values, problem.input.new_empty(rows if predicted_tokens else 0, dtype=torch.int64)


_statistics = _define(
    f"linear_cross_entropy_statistics({_PROBLEM}, bool weighted, bool predicted_tokens) -> (Tensor logits_max,"
    " Tensor log_sum_exp, Tensor predicted, Tensor weighted_sum, Tensor entropy_of_rows, Tensor tokens)",
    _statistics_kernel,
    _statistics_fake,
)


def _gradients_kernel(
    of_log_sum_exp: Tensor,
    of_predicted: Tensor,
    of_weighted: Tensor | None,
    of_entropy: Tensor | None,
    logits_max: Tensor,
    log_sum_exp: Tensor,
    entropy_of_rows: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    *arguments, of_input, of_weight, of_bias = args
    problem = _problem(*arguments)
    cotangents = Statistics(logits_max, of_log_sum_exp, of_predicted, of_weighted, of_entropy)
    needed = (of_input, of_weight, of_bias)
    return _given(
        problem.input, _asked(_kernels.gradients(problem, cotangents, log_sum_exp, entropy_of_rows, needed), needed)
    )


def _gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    *arguments, of_input, of_weight, of_bias = args[7:]
    problem = _problem(*arguments)
    return _empty_gradients(problem, (of_input, of_weight, of_bias), None)


_gradients = _define(
    "linear_cross_entropy_gradients(Tensor of_log_sum_exp, Tensor of_predicted, Tensor? of_weighted,"
    f" Tensor? of_entropy, Tensor logits_max, Tensor log_sum_exp, Tensor? entropy_of_rows, {_PROBLEM}, bool of_input,"
    " bool of_weight, bool of_bias) -> (Tensor input_grad, Tensor weight_grad, Tensor bias_grad)",
    _gradients_kernel,
    _gradients_fake,
)


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *ctx.arguments, ctx.weighted, _ = inputs
    ctx.tensor_places = [i for i, value in enumerate(ctx.arguments) if isinstance(value, Tensor)]
    ctx.has_entropy = ctx.arguments[-1]
    logits_max, log_sum_exp, _, _, entropy, _ = output
    ctx.save_for_backward(*(ctx.arguments[i] for i in ctx.tensor_places), logits_max, log_sum_exp, entropy)
    ctx.arguments = [None if isinstance(value, Tensor) else value for value in ctx.arguments]
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
    arguments = list(ctx.arguments)
    for place, tensor in zip(ctx.tensor_places, tensors, strict=True):
        arguments[place] = tensor
    _, of_log_sum_exp, of_predicted, of_weighted, of_entropy, _ = grad_outputs
    needed = ctx.needs_input_grad[:3]
    results = _gradients(
        of_log_sum_exp,
        of_predicted,
        of_weighted if ctx.weighted else None,
        of_entropy if ctx.has_entropy else None,
        logits_max,
        log_sum_exp,
        entropy if ctx.has_entropy else None,
        *arguments,
        *needed,
    )
    return *_asked(results, needed), *(None,) * (len(ctx.needs_input_grad) - 3)


torch.library.register_autograd(
    schema_of(_statistics).name, _differentiate_statistics, setup_context=_save_statistics, lib=_library
)


def _loss_and_gradients_kernel(*args: Any) -> tuple[Tensor, ...]:
    *arguments, log_sum_exp, predicted, weighted, square, predicted_tokens, of_input, of_weight, of_bias = args
    problem, needed = _problem(*arguments), (of_input, of_weight, of_bias)
    factors = Coefficients(log_sum_exp, predicted, weighted, square)
    loss, gradients, tokens = _kernels.loss_and_gradients(problem, factors, needed, predicted_tokens)
    dtype = _held_dtype(problem)
    held = [None if gradient is None else gradient.to(dtype) for gradient in _asked(gradients, needed)]
    return loss, *_given(problem.input, held), *_given(problem.target, [tokens])


def _loss_and_gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    *arguments, _, _, _, _, predicted_tokens, of_input, of_weight, of_bias = args
    problem = _problem(*arguments)
    return (
        problem.input.new_empty((), dtype=accumulation_dtype(problem.input.dtype)),
        *_empty_gradients(problem, (of_input, of_weight, of_bias), _held_dtype(problem)),
        problem.input.new_empty(problem.input.shape[0] if predicted_tokens else 0, dtype=torch.int64),
    )


_loss_and_gradients = _define(
    f"linear_cross_entropy_loss_and_gradients({_PROBLEM}, Tensor log_sum_exp, Tensor predicted, Tensor? weighted,"
    " Tensor? square, bool predicted_tokens, bool of_input, bool of_weight, bool of_bias) -> (Tensor loss,"
    " Tensor input_grad, Tensor weight_grad, Tensor bias_grad, Tensor tokens)",
    _loss_and_gradients_kernel,
    _loss_and_gradients_fake,
)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *gradients, _ = output
    ctx.dtype = inputs[0].dtype
    ctx.number = len(inputs)
    ctx.save_for_backward(*gradients)


def _scale_gradients(ctx: Any, grad_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    _refuse_second_derivatives()
    gradients = [(gradient * grad_loss).to(ctx.dtype) for gradient in ctx.saved_tensors]
    return *_asked(gradients, ctx.needs_input_grad[:3]), *(None,) * (ctx.number - 3)


torch.library.register_autograd(
    schema_of(_loss_and_gradients).name, _scale_gradients, setup_context=_save_gradients, lib=_library
)


def statistics(problem: Problem, weighted: bool, predicted_tokens: bool) -> Statistics:
    """Reduce the logits of every row in compiled code."""
    results = _statistics(*_flat(problem), weighted, predicted_tokens)
    return Statistics(*_asked(results, (True, True, True, weighted, problem.entropy, predicted_tokens)))  # type: ignore[arg-type]


def loss(
    problem: Problem, coefficients: Coefficients, needed: Sequence[bool], predicted_tokens: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of all rows in compiled code, and its gradients with it."""
    result, *_, tokens = _loss_and_gradients(*_flat(problem), *coefficients, predicted_tokens, *needed)
    return result, tokens if predicted_tokens else None


def _empty_gradients(problem: Problem, needed: Sequence[bool], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    arguments = (problem.input, problem.linear_weight, problem.linear_bias)
    return tuple(
        problem.input.new_empty(0)
        if argument is None or not is_needed
        else argument.new_empty(argument.shape, dtype=dtype or argument.dtype)
        for argument, is_needed in zip(arguments, needed, strict=True)
    )


def _held_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of gradients that wait for the loss's own: float16 could not hold what a scaler will enlarge."""
    return torch.float32 if problem.input.dtype == torch.float16 else problem.input.dtype
