"""The kernel as a custom operator for ``torch.compile``, which would unroll its loop over chunks."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._autograd.raw_operator import NAMESPACE
from torch_aclnn_ops.functional.linear_kl_div.chunks import losses_and_gradients_in_chunks
from torch_aclnn_ops.functional.linear_kl_div.divergences import Measure
from torch_aclnn_ops.functional.linear_kl_div.inputs import NAME, Inputs, Options, Teacher
from torch_aclnn_ops.ops._head.tiling import LogitOptions

import torch
from torch import Tensor

_STUDENT = 3
_ARGUMENTS = 17
_FACTORS = 9  # its place among the arguments


def _inputs(arguments: Sequence[Any]) -> Inputs:
    """Undo :func:`_flatten`."""
    is_log, divergence, beta, temperature, chunk_size, max_memory, gradients = arguments[_FACTORS + 1 :]
    logits = LogitOptions(None, temperature, chunk_size, max_memory, function=NAME)
    options = Options(Measure(divergence, beta), logits, tuple(gradients))
    student, of_teacher, target = arguments[:_STUDENT], arguments[_STUDENT : _FACTORS - 1], arguments[_FACTORS - 1]
    return Inputs._make((*student, Teacher._make((*of_teacher, is_log)), target, options, None, True))


def _flatten(inputs: Inputs, factors: Tensor | None) -> tuple[Any, ...]:
    # Dynamo of torch 2.9 does not trace properties of named tuples.
    input, linear_weight, linear_bias, teacher, target, options, *_ = inputs
    *of_teacher, is_log = teacher
    measure, logits = options.measure, options.logits
    return (
        *(input, linear_weight, linear_bias, *of_teacher, target, factors),
        *(is_log, measure.divergence, measure.beta, logits.temperature, logits.chunk_size, logits.max_memory),
        options.gradients,
    )


@torch.library.custom_op(
    f"{NAMESPACE}::{NAME}",
    mutates_args=(),
    schema="(Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor? teacher_input, Tensor? teacher_weight,"
    " Tensor? teacher_bias, Tensor? teacher_values, Tensor? teacher_indices, Tensor? target, Tensor? factors,"
    " bool is_log, str divergence, float beta, float temperature, SymInt? chunk_size, SymInt? max_memory,"
    " bool[] gradients) -> Tensor[]",
)
def _compare(*args: Any) -> list[Tensor]:
    inputs, factors = _inputs(args), args[_FACTORS]
    made: Sequence[Any]
    losses, made = losses_and_gradients_in_chunks(inputs, factors)
    if factors is None:
        return [losses]
    held = [gradient.to(_held_dtype(inputs)) for gradient in made if gradient is not None]
    return [(losses * factors).sum(), *held]


@_compare.register_fake
def _compare_fake(*args: Any) -> list[Tensor]:
    inputs, factors = _inputs(args), args[_FACTORS]
    dtype = inputs.loss_dtype()
    if factors is None:
        return [inputs.input.new_empty(inputs.input.shape[0], dtype=dtype)]
    needed = compress(args, inputs.options.gradients)
    return [
        inputs.input.new_empty((), dtype=dtype),
        *(argument.new_empty(argument.shape, dtype=_held_dtype(inputs)) for argument in needed),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.dtype, ctx.needed, ctx.constants = inputs[0].dtype, _inputs(inputs).options.gradients, inputs[_FACTORS + 1 :]
    ctx.has_gradients = inputs[_FACTORS] is not None
    ctx.save_for_backward(*(output[1:] if ctx.has_gradients else inputs[:_FACTORS]))


def _differentiate(ctx: Any, grad_outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{NAME}: a compiled call must not be differentiated with create_graph=True, because its operator has a"
            " first derivative only; call it outside of torch.compile"
        )
    if ctx.has_gradients:
        found = [(gradient * grad_outputs[0]).to(ctx.dtype) for gradient in ctx.saved_tensors]
    else:
        _, *made = _compare(*ctx.saved_tensors, grad_outputs[0], *ctx.constants)
        found = [gradient.to(ctx.dtype) for gradient in made]
    return *scatter(ctx.needed, found), *(None,) * (_ARGUMENTS - len(ctx.needed))


_compare.register_autograd(_differentiate, setup_context=_save)


def losses_of_rows(inputs: Inputs) -> Tensor:
    """Return the loss of every row in compiled code."""
    losses: Tensor = _compare(*_flatten(inputs, None))[0]
    return losses


def weighted_sum(inputs: Inputs, factors: Tensor) -> Tensor:
    """Return the sum of the rows' losses times factors in compiled code, with gradients from the same pass."""
    total: Tensor = _compare(*_flatten(inputs, factors))[0]
    return total


def _held_dtype(inputs: Inputs) -> torch.dtype:
    """Return the dtype of the saved gradients: float32 for float16, whose values underflow before they are scaled."""
    return torch.float32 if inputs.input.dtype == torch.float16 else inputs.input.dtype
