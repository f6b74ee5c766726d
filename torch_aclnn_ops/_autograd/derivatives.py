"""The derivatives of a formula, also as a Function, and queries about the active autograd and ``torch.func`` modes."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from torch_aclnn_ops._torch_compat.private import (
    assume_constant_result,
    get_interpreter_stack,
    get_unwrapped,
    in_forward_ad,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

TensorFunction = Callable[..., tuple[Tensor, ...]]


def as_function_of(
    function: TensorFunction, args: Sequence[Any], positions: Sequence[int]
) -> tuple[TensorFunction, list[Tensor]]:
    """Return ``function`` with all arguments fixed except those at ``positions``, and the values of these."""

    def function_of_selected(*values: Tensor) -> tuple[Tensor, ...]:
        replaced = list(args)
        for position, value in zip(positions, values, strict=True):
            replaced[position] = value
        return function(*replaced)

    return function_of_selected, [args[position] for position in positions]


def scatter(selectors: Iterable[bool], values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple with the values at the selected positions, in order, and ``None`` elsewhere."""
    remaining = iter(values)
    return tuple(next(remaining) if selected else None for selected in selectors)


def vjp(function: TensorFunction, *primals: Tensor) -> tuple[tuple[Tensor, ...], TensorFunction]:
    """Return a function's outputs and its pullback, which maps output cotangents to gradients; call it only once.

    Uses ordinary autograd where possible: unlike ``torch.func.vjp``, it works while saved-tensor hooks are active, as
    in a checkpointed or offloaded backward pass. The results are differentiable if grad mode is enabled.
    """
    if torch.compiler.is_compiling() or in_functorch_transform() or in_forward_ad():
        outputs, pull_back, *_ = torch.func.vjp(function, *primals)
        return outputs, lambda *cotangents: pull_back(cotangents)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Alias each primal, so that a primal computed from another one is still an independent variable.
        variables = [
            primal.view_as(primal) if create_graph and primal.requires_grad else primal.detach().requires_grad_()
            for primal in primals
        ]
        outputs = function(*variables)

    def pull_back_by_autograd(*cotangents: Tensor) -> tuple[Tensor, ...]:
        pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
        gradients: Sequence[Tensor | None] = (None,) * len(variables)
        if pairs:
            used_outputs, cotangents = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(
                used_outputs, variables, cotangents, create_graph=create_graph, allow_unused=True
            )
        return tuple(
            torch.zeros_like(variable) if gradient is None else gradient
            for variable, gradient in zip(variables, gradients, strict=True)
        )

    return outputs, pull_back_by_autograd


def jvp(function: TensorFunction, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tangents of the outputs, computed with two vjps.

    A vjp maps a cotangent u to J^T u. It is linear in u, so its own vjp maps a tangent t to J t for any u. This needs
    no nested forward mode, which PyTorch supports only inside ``torch.func``.
    """
    outputs, pull_back, *_ = torch.func.vjp(function, *primals)
    _, push_forward, *_ = torch.func.vjp(pull_back, tuple(torch.zeros_like(output) for output in outputs))
    result: tuple[Tensor, ...] = push_forward(tuple(tangents))[0]
    return result


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


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose backward pass recomputes what it needs, instead of keeping it."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


@assume_constant_result  # Dynamo cannot trace it
def in_functorch_transform() -> bool:
    """Return whether this is called inside ``torch.func.grad``, ``vmap`` or another transform."""
    return get_interpreter_stack() is not None


@assume_constant_result  # Dynamo of older versions takes every graph for an exported one
def is_exporting() -> bool:
    """Return whether ``torch.export`` traces, which keeps the forward pass of a Function, but no backward pass."""
    return torch.compiler.is_exporting()


def in_nested_forward_mode() -> bool:
    """Return whether this is called inside a jvp of a jvp, where PyTorch treats a Function's tangent as a constant."""
    return _transforms().count("Jvp") > 1


def any_differentiated(values: Sequence[Any]) -> bool:
    """Return whether any of these values needs a derivative, in reverse or forward mode."""
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return in_forward_ad() and any(map(has_tangent, values))


def any_wrapped(values: Sequence[Any]) -> bool:
    """Return whether any of these values is wrapped by a ``torch.func`` transform, active or already exited."""
    for value in values:
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            return True
    return False


def has_tangent(value: Any) -> bool:
    """Return whether a value is a dual tensor with a tangent."""
    return isinstance(value, Tensor) and in_forward_ad() and _is_dual(value)


def is_dual_in_graph(value: Any) -> bool:
    """Return :func:`has_tangent` in a graph of Dynamo, which enters forward-mode AD without Python's counter of it."""
    return in_functorch_transform() and isinstance(value, Tensor) and _is_dual(value)


def _is_dual(tensor: Tensor) -> bool:
    while is_batchedtensor(tensor):  # torch cannot unpack it
        tensor = get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor, level=0).tangent is not None  # torch has no other level


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is batched by ``vmap`` at any level of transforms."""
    if is_legacy_batchedtensor(tensor):
        return True
    if not is_functorch_wrapped_tensor(tensor):
        return False
    return "Vmap" in _transforms()


def _transforms() -> list[str]:
    """Return the names of the active ``torch.func`` transforms."""
    return [transform.key().name for transform in get_interpreter_stack() or ()]
