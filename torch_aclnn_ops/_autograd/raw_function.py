"""The ``autograd.Function`` of a raw operator, derived from its formula."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from torch_aclnn_ops._autograd.derivatives import TensorFunction, as_function_of, jvp, scatter, vjp

import torch
from torch import Tensor


def raw_function(
    name: str, run: Callable[..., Any], formula: Callable[..., Any], batch: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """Create the ``autograd.Function`` of an operator.

    Args:
        name: The operator's name.
        run: The operator, without derivatives.
        formula: The operator in differentiable PyTorch calls, from which the derivatives are derived.
        batch: The batching rule for ``torch.vmap``.
    """

    class RawFunction(torch.autograd.Function):
        vmap = staticmethod(batch)

        @staticmethod
        def forward(*args: Any) -> Any:
            return run(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            tensors = [arg if isinstance(arg, Tensor) else None for arg in inputs]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.others = [None if isinstance(arg, Tensor) else arg for arg in inputs]
            ctx.differentiable = [out.is_floating_point() for out in as_tuple(output)]
            ctx.mark_non_differentiable(*(out for out in as_tuple(output) if not out.is_floating_point()))

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
            function, primals = _formula_of(formula, ctx, ctx.needs_input_grad)
            _, pull_back = vjp(function, *primals)
            used = (
                grad for grad, differentiable in zip(grad_outputs, ctx.differentiable, strict=True) if differentiable
            )
            return scatter(ctx.needs_input_grad, pull_back(*used))

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
            function, primals = _formula_of(formula, ctx, [tangent is not None for tangent in tangents])
            given = [tangent for tangent in tangents if tangent is not None]
            by_output = scatter(ctx.differentiable, jvp(function, primals, given))
            return by_output if len(by_output) > 1 else by_output[0]

    RawFunction.__name__ = RawFunction.__qualname__ = f"RawFunction_{name}"
    return RawFunction


def _formula_of(
    formula: Callable[..., Any], ctx: Any, selectors: Sequence[bool]
) -> tuple[TensorFunction, list[Tensor]]:
    """Return the formula's floating-point outputs as a function of the selected arguments, and their values."""
    saved = [other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)]

    def function(*args: Any) -> tuple[Tensor, ...]:
        return tuple(out for out in as_tuple(formula(*args)) if out.is_floating_point())

    return as_function_of(function, saved, list(compress(range(len(saved)), selectors)))


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Wrap a single output in a tuple; return a tuple unchanged."""
    return outputs if isinstance(outputs, tuple) else (outputs,)
