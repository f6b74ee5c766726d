"""Autograd of the row statistics, and of a scalar loss whose gradients are computed in the forward pass."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch_aclnn_ops._autograd.derivatives import (
    any_differentiated,
    as_function_of,
    in_functorch_transform,
    is_batched,
    is_jit_tracing,
    scatter,
    vjp,
)
from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled
from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._torch_compat.derivatives import fast_apply
from torch_aclnn_ops.functional._head.gradients import scaled
from torch_aclnn_ops.functional.linear_cross_entropy.row_functions import RowFunction, statistics_of_rows
from torch_aclnn_ops.ops._head.tiling import LogitOptions
from torch_aclnn_ops.ops.linear_cross_entropy import compiled
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import (
    Kernels,
    choose_kernels,
    loss_and_gradients,
)
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients, Statistics, losses_of_rows

import torch
from torch import Tensor

# input, linear_weight, linear_bias, target, class_weight
_BY_ROW = (True, False, False, True, False)
_TENSORS = len(_BY_ROW)
_KERNELS_DIFFERENTIATE = 3  # kernels differentiate with respect to the first three arguments


def statistics(inputs: Inputs, kernels: Kernels) -> Statistics:
    """Reduce the logits of every row, differentiably to any order; eager calls outside of transforms use ``kernels``.

    Returns:
        The requested statistics in float32, or float64 for float64 inputs.
    """
    if is_jit_tracing():
        # All rows at once: a trace would record the chunks for the traced number of rows.
        return inputs.requested.name(statistics_of_rows(*inputs))
    return inputs.requested.name(_differentiable_statistics(*inputs, kernels))


def _differentiable_formula(options: LogitOptions, requested: RequestedOutputs) -> RowFunction:
    """Return the differentiable statistics as a function of rows."""
    function = partial(
        statistics_of_rows, options=options, requested=RequestedOutputs(requested.weighted, requested.entropy)
    )
    return RowFunction(lambda *args: function(*args)[1:], _BY_ROW, (True,) * requested.differentiable)


def _statistics_formula(*args: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*args[:-1])
    requested = inputs.requested
    function = partial(statistics_of_rows, options=inputs.options, requested=requested)
    results = (True,) * (1 + requested.differentiable + requested.predicted_tokens)
    return RowFunction(function, _BY_ROW, results)(inputs[:_TENSORS], inputs.tile_rows().chunks())


class StatisticsFunction(torch.autograd.Function):
    """Row statistics; kernels compute the forward and first backward pass, and the formula all other derivatives.

    The arguments are the fields of :class:`Inputs` and the kernels; the results are the requested statistics.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Reduce the logits."""
        if _is_any_batched(args):
            log_call("linear_cross_entropy", Implementation.FALLBACK, lambda: "it is batched by vmap")
            return _statistics_formula(*args)
        *fields, kernels = args
        return tuple(result for result in kernels.statistics(Inputs(*fields)) if result is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save tensors for backward and jvp."""
        *tensors, ctx.options, ctx.requested, ctx.kernels = inputs
        reduced = ctx.requested.name(output)
        # Not logits_max: in a jvp of a vmap, torch loses the mark, and then requires a tangent.
        if reduced.predicted_tokens is not None:
            ctx.mark_non_differentiable(reduced.predicted_tokens)
        saved = (*tensors, reduced.logits_max, reduced.log_sum_exp, reduced.entropy)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)  # functorch requires the same tensors for both

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments that need them."""
        positions = frozenset(i for i in range(_TENSORS) if ctx.needs_input_grad[i])  # not a pytree for functorch
        grad_statistics = grad_outputs[1 : 1 + ctx.requested.differentiable]
        constants = ctx.options, ctx.requested, ctx.kernels, positions
        found = _statistics_backward(*grad_statistics, *ctx.saved_tensors, *constants)
        return scatter(ctx.needs_input_grad, found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the tangents of the statistics."""
        tensors = ctx.saved_tensors[:_TENSORS]
        positions, given = _present(tangents[:_TENSORS])
        formula = _differentiable_formula(ctx.options, ctx.requested)
        results = formula.jvp(tensors, positions, given, _chunks(tensors, ctx.options))
        logits_max = ctx.saved_tensors[_TENSORS]  # a constant: the loss does not depend on it
        return torch.zeros_like(logits_max), *results, *(None,) * ctx.requested.predicted_tokens


class _StatisticsBackwardFunction(torch.autograd.Function):
    """The differentiable backward of :class:`StatisticsFunction`, of the gradients of the statistics and the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        grad_statistics, tensors, (logits_max, log_sum_exp, entropy), constants = _split(args)
        options, requested, kernels, positions = constants
        if max(positions) < _KERNELS_DIFFERENTIATE and not _is_any_batched(args):
            needed = (0 in positions, 1 in positions, 2 in positions)
            named = RequestedOutputs(requested.weighted, requested.entropy).name((logits_max, *grad_statistics))
            inputs = Inputs._make((*tensors, options, RequestedOutputs(entropy=requested.entropy, gradients=needed)))
            found = kernels.gradients(inputs, named, log_sum_exp, entropy)
            results: tuple[Any, ...] = tuple(found[position] for position in sorted(positions))
            return results
        return _gradients_formula(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.options, ctx.requested, _, ctx.positions = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        args, function, chunks = _gradient_function(ctx)
        positions = [i for i in range(len(args)) if ctx.needs_input_grad[i]]
        has_gradient = [i in positions for i in range(len(ctx.needs_input_grad))]  # the saved statistics have none
        return scatter(has_gradient, function.vjp(args, positions, grad_outputs, chunks))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        args, function, chunks = _gradient_function(ctx)
        positions, given = _present(tangents[: len(args)])
        found = function.jvp(args, positions, given, chunks)
        arguments = (args[ctx.requested.differentiable + position] for position in sorted(ctx.positions))
        return tuple(gradient.to(argument.dtype) for gradient, argument in zip(found, arguments, strict=True))


def _split(args: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """Split the arguments into gradients of the statistics, tensors of ``Inputs``, saved statistics and constants."""
    end = args[-3].differentiable
    return args[:end], args[end : end + _TENSORS], args[end + _TENSORS : -4], args[-4:]


def _gradients_formula(*args: Any) -> tuple[Tensor, ...]:
    grad_statistics, tensors, _, (options, requested, _, positions) = _split(args)
    formula = _differentiable_formula(options, requested)
    return formula.vjp(tensors, sorted(positions), grad_statistics, _chunks(tensors, options))


def _gradient_function(ctx: Any) -> tuple[Sequence[Any], RowFunction, list[slice]]:
    """Return the backward as a :class:`RowFunction`, with its arguments and the chunks of rows.

    The saved statistics are not arguments: they depend on the inputs, so the function recomputes them.
    """
    number = ctx.requested.differentiable
    args = ctx.saved_tensors[: number + _TENSORS]
    formula, positions = _differentiable_formula(ctx.options, ctx.requested), sorted(ctx.positions)

    def gradients(*args: Any) -> tuple[Tensor, ...]:
        function, primals = as_function_of(formula.function, args[number:], positions)
        _, pull_back = vjp(function, *primals)
        results: tuple[Tensor, ...] = pull_back(*args[:number])
        return results

    by_row = (*(True,) * number, *_BY_ROW)
    function = RowFunction(gradients, by_row, [_BY_ROW[position] for position in positions])
    return args, function, _chunks(args[number:], ctx.options)


def _chunks(tensors: Sequence[Any], options: LogitOptions) -> list[slice]:
    return Inputs._make((*tensors, options, RequestedOutputs())).tile_rows().chunks()


def _present(tangents: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
    present = [(i, tangent) for i, tangent in enumerate(tangents) if tangent is not None]
    return [i for i, _ in present], [tangent for _, tangent in present]


def _is_any_batched(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, Tensor) and is_batched(arg) for arg in args)


def _in_compiled_code(*args: Any) -> Sequence[Any]:
    if in_functorch_transform() or any_differentiated(args[_KERNELS_DIFFERENTIATE:_TENSORS]):
        # Dynamo treats higher derivatives of a Function as zero; the custom operators have a first derivative only.
        return _statistics_formula(*args)
    return [result for result in compiled.statistics(Inputs(*args[:-1])) if result is not None]


_differentiable_statistics = EagerOrCompiled(StatisticsFunction, _statistics_formula, _in_compiled_code)
_statistics_backward = EagerOrCompiled(_StatisticsBackwardFunction, _gradients_formula)


def loss(inputs: Inputs, coefficients: Coefficients) -> tuple[Tensor, Tensor | None]:
    """Compute the sum of the losses of all rows together with its gradients: three matrix products instead of four.

    The first backward pass consumes the gradients; a second one, or double backward, recomputes the logits. Also
    returns the predicted tokens if they are requested.
    """
    if torch.compiler.is_compiling():
        return compiled.loss(inputs, coefficients)
    value, tokens = _apply_loss(*inputs[:3], inputs, coefficients)
    return value, tokens


class _LossFunction(torch.autograd.Function):
    """The loss and its gradients; it is not used inside transforms, so the gradients can be stored on ctx."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, Tensor | None]:
        *_, inputs, coefficients = args
        # Inputs are saved by save_for_backward, so that saved-tensor hooks apply.
        ctx.save_for_backward(*inputs[:_TENSORS], *coefficients)
        ctx.options, ctx.dtype = inputs.options, inputs.linear_weight.dtype
        value, ctx.gradients, tokens = loss_and_gradients(inputs, coefficients)
        if tokens is not None:
            ctx.mark_non_differentiable(tokens)
        return value, tokens

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None or torch.is_grad_enabled():
            saved: Any = ctx.saved_tensors
            inputs = Inputs._make((*saved[:_TENSORS], ctx.options, RequestedOutputs()))
            factors = Coefficients(*saved[_TENSORS:])
            gradients = _recompute_gradients(inputs, factors, ctx.needs_input_grad[:3], grad_loss)
        else:
            if is_batched(grad_loss):
                ctx.gradients = gradients  # not consumed: scaled() is out of place then
            gradients = scaled(gradients, grad_loss)
        if ctx.dtype != torch.float32:
            gradients = [None if gradient is None else gradient.to(ctx.dtype) for gradient in gradients]
        return *gradients, None, None


_apply_loss = fast_apply(_LossFunction)


def _recompute_gradients(
    inputs: Inputs, coefficients: Coefficients, needed: Sequence[bool], grad_loss: Tensor
) -> Sequence[Tensor | None]:
    """Recompute the gradients of the loss differentiably, for double backward."""
    names = [name for name, is_needed in zip(Inputs._fields, needed, strict=False) if is_needed]

    def sum_of_losses(*values: Tensor) -> tuple[Tensor]:
        given = inputs._replace(**dict[str, Any](zip(names, values, strict=True)))
        given = given._replace(requested=RequestedOutputs(weighted=coefficients.weighted is not None))
        reduced = statistics(given, choose_kernels(given))
        return (losses_of_rows(reduced, coefficients).sum(),)

    _, pull_back = vjp(sum_of_losses, *(getattr(inputs, name) for name in names))
    return scatter(needed, pull_back(grad_loss))
