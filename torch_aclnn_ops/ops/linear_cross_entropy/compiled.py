"""The kernels of the linear cross entropy as custom operators, for ``torch.compile``.

Tracing the kernels themselves would unroll their loops over chunks for a fixed number of rows.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._autograd.raw_operator import NAMESPACE
from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops._head.tiling import LogitOptions
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import choose_kernels, loss_and_gradients
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients, Statistics

import torch
from torch import Tensor

_INPUTS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? class_weight, float? softcap,"
    " float temperature, SymInt? chunk_size, SymInt? max_memory, bool is_shard, bool weighted, bool entropy,"
    " bool predicted_tokens, bool[] gradients"
)
_NUMBER_OF_INPUTS = 14


def _inputs(arguments: Sequence[Any]) -> Inputs:
    """Rebuild inputs from the arguments returned by :func:`flatten`."""
    weighted, entropy, predicted_tokens, gradients = arguments[10:_NUMBER_OF_INPUTS]
    requested = RequestedOutputs(weighted, entropy, predicted_tokens, tuple(gradients))
    return Inputs._make((*arguments[:5], LogitOptions(*arguments[5:10]), requested))


def flatten(inputs: Inputs) -> tuple[Any, ...]:
    """Flatten inputs to the arguments of a custom operator."""
    options, requested = inputs.options, inputs.requested
    return (
        *inputs[:5],
        *(options.softcap, options.temperature, options.chunk_size, options.max_memory, options.is_shard),
        *(requested.weighted, requested.entropy, requested.predicted_tokens, requested.gradients),
    )


@torch.library.custom_op(
    f"{NAMESPACE}::linear_cross_entropy_statistics", mutates_args=(), schema=f"({_INPUTS}) -> Tensor[]"
)
def _statistics(*args: Any) -> list[Tensor]:
    inputs = _inputs(args)
    if any(inputs.requested.gradients):
        inputs.tile_rows()  # raises now if max_memory is too small for the backward pass
    return [result for result in choose_kernels(inputs).statistics(inputs) if result is not None]


@_statistics.register_fake
def _statistics_fake(*args: Any) -> list[Tensor]:
    return _inputs(args).empty_statistics()


@torch.library.custom_op(
    f"{NAMESPACE}::linear_cross_entropy_gradients",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor grad_log_sum_exp, Tensor grad_predicted, Tensor? grad_weighted, Tensor? grad_entropy,"
    " Tensor logits_max, Tensor log_sum_exp, Tensor? entropy_of_rows) -> Tensor[]",
)
def _gradients(*args: Any) -> list[Any]:
    inputs = _inputs(args)
    *grad_statistics, logits_max, log_sum_exp, entropy = args[_NUMBER_OF_INPUTS:]
    kernels = choose_kernels(inputs)
    made = kernels.gradients(inputs, Statistics(logits_max, *grad_statistics), log_sum_exp, entropy)
    return list(compress(made, inputs.requested.gradients))


@_gradients.register_fake
def _gradients_fake(*args: Any) -> list[Tensor]:
    needed = compress(args, _inputs(args).requested.gradients)
    return [argument.new_empty(argument.shape) for argument in needed]


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.options, ctx.requested = _inputs(inputs)[5:]
    reduced = ctx.requested.name(output)
    ctx.save_for_backward(*inputs[:5], reduced.logits_max, reduced.log_sum_exp, reduced.entropy)
    ctx.set_materialize_grads(True)


def _raise_if_differentiated_twice() -> None:
    """Raise for double backward; AOTAutograd's backward raises by itself."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy: a compiled call must not be differentiated with create_graph=True, because its"
            " operators support first derivatives only; call it outside of torch.compile"
        )


def _differentiate_statistics(ctx: Any, grad_outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    _raise_if_differentiated_twice()
    *tensors, logits_max, log_sum_exp, entropy = ctx.saved_tensors
    needed = tuple(ctx.needs_input_grad[:3])
    inputs = Inputs._make(
        (*tensors, ctx.options, RequestedOutputs(ctx.requested.weighted, ctx.requested.entropy, False, needed))
    )
    grad_statistics = ctx.requested.name(grad_outputs)[1:5]
    results = _gradients(*flatten(inputs), *grad_statistics, logits_max, log_sum_exp, entropy)
    return *scatter(needed, results), *(None,) * (_NUMBER_OF_INPUTS - len(needed))


_statistics.register_autograd(_differentiate_statistics, setup_context=_save_statistics)


@torch.library.custom_op(
    f"{NAMESPACE}::linear_cross_entropy_loss_and_gradients",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor log_sum_exp, Tensor predicted, Tensor? weighted_sum, Tensor? square) -> Tensor[]",
)
def _loss_and_gradients(*args: Any) -> list[Any]:
    inputs = _inputs(args)
    inputs.tile_rows()  # raises if max_memory is too small for all rows, as in eager mode
    made: Any
    loss, made, tokens = loss_and_gradients(inputs, Coefficients(*args[_NUMBER_OF_INPUTS:]))
    held = [gradient.to(_held_dtype(inputs)) for gradient in compress(made, inputs.requested.gradients)]
    return [loss, *held] if tokens is None else [loss, *held, tokens]


@_loss_and_gradients.register_fake
def _loss_and_gradients_fake(*args: Any) -> list[Tensor]:
    inputs = _inputs(args)
    input, requested = inputs.input, inputs.requested
    needed = compress(args, requested.gradients)
    return [
        input.new_empty((), dtype=accumulation_dtype(input.dtype)),
        *(argument.new_empty(argument.shape, dtype=_held_dtype(inputs)) for argument in needed),
        *[input.new_empty(input.shape[0], dtype=torch.int64)] * requested.predicted_tokens,
    ]


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.dtype, ctx.number, ctx.needed = inputs[0].dtype, len(inputs), _inputs(inputs).requested.gradients
    ctx.save_for_backward(*output[1 : 1 + sum(ctx.needed)])


def _scale_gradients(ctx: Any, grad_outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    _raise_if_differentiated_twice()
    scaled = [(gradient * grad_outputs[0]).to(ctx.dtype) for gradient in ctx.saved_tensors]
    return *scatter(ctx.needed, scaled), *(None,) * (ctx.number - len(ctx.needed))


_loss_and_gradients.register_autograd(_scale_gradients, setup_context=_save_gradients)


def statistics(inputs: Inputs) -> Statistics:
    """Reduce the logits of every row, in compiled code."""
    return inputs.requested.name(_statistics(*flatten(inputs)))


def loss(inputs: Inputs, coefficients: Coefficients) -> tuple[Tensor, Tensor | None]:
    """Compute the sum of the losses together with its gradients, in compiled code."""
    value, *others = _loss_and_gradients(*flatten(inputs), *coefficients)
    return value, others[-1] if inputs.requested.predicted_tokens else None


def _held_dtype(inputs: Inputs) -> torch.dtype:
    """Return the dtype of saved gradients: float32 for float16, which would underflow before loss scaling."""
    return torch.float32 if inputs.input.dtype == torch.float16 else inputs.input.dtype
