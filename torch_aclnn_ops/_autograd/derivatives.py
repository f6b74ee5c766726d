"""The vector-Jacobian product of a function, and what kind of differentiation a tensor takes part in."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_aclnn_ops._torch_compat.derivatives import (
    get_interpreter_stack,
    in_forward_ad,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch_aclnn_ops._torch_compat.modes import assume_constant_result
from torch_aclnn_ops._torch_compat.public import in_jit_trace

import torch
from torch import Tensor
from torch.autograd import forward_ad

TensorFunction = Callable[..., tuple[Tensor, ...]]


def as_function_of(
    function: TensorFunction, args: Sequence[Any], positions: Sequence[int]
) -> tuple[TensorFunction, list[Tensor]]:
    """Return a function as one of the arguments at ``positions`` alone, and these arguments."""

    def function_of_selected(*values: Tensor) -> tuple[Tensor, ...]:
        replaced = list(args)
        for position, value in zip(positions, values, strict=True):
            replaced[position] = value
        return function(*replaced)

    return function_of_selected, [args[position] for position in positions]


def scatter(selectors: Iterable[bool], values: Iterable[Any]) -> tuple[Any, ...]:
    """Put the values at the selected places, in order, and ``None`` at the others."""
    remaining = iter(values)
    return tuple(next(remaining) if selected else None for selected in selectors)


def vjp(function: TensorFunction, *primals: Tensor) -> tuple[tuple[Tensor, ...], TensorFunction]:
    """Return a function's outputs, and the map from their cotangents to the primals'; call that map once.

    Ordinary autograd does it where it can: unlike ``torch.func.vjp`` it works while saved-tensor hooks are active, as
    in a checkpointed or offloaded backward pass. The results can be differentiated again where grad mode is on.
    """
    if torch.compiler.is_compiling() or in_functorch_transform() or in_forward_ad():
        outputs, pull_back, *_ = torch.func.vjp(function, *primals)
        return outputs, lambda *cotangents: pull_back(cotangents)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias of each primal, so that a primal which is computed from another is still a variable of its own.
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
    """Return the outputs' tangents.

    A vjp maps a cotangent u to J^T u. It is linear, so its own vjp maps a tangent t to J t, whatever u is: a jvp
    without nested forward mode, which PyTorch has only inside ``torch.func``.
    """
    outputs, pull_back, *_ = torch.func.vjp(function, *primals)
    _, push_forward, *_ = torch.func.vjp(pull_back, tuple(torch.zeros_like(output) for output in outputs))
    result: tuple[Tensor, ...] = push_forward(tuple(tangents))[0]
    return result


@assume_constant_result  # Dynamo cannot trace it
def in_functorch_transform() -> bool:
    """Return whether the caller runs inside ``torch.func.grad``, ``vmap`` or another transform."""
    is_inside: bool = get_interpreter_stack() is not None
    return is_inside


def is_jit_tracing() -> bool:
    """Return whether ``torch.jit.trace`` records the caller's calls, for tensors of any shape."""
    return not torch.compiler.is_compiling() and in_jit_trace()


def in_nested_forward_mode() -> bool:
    """Return whether the caller runs inside jvp of jvp, where PyTorch takes a Function's tangent for a constant."""
    return _transforms().count("Jvp") > 1


def any_differentiated(values: Sequence[Any]) -> bool:
    """Return whether autograd differentiates by any of these values now, in either mode."""
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return in_forward_ad() and any(map(has_tangent, values))


def any_wrapped(values: Sequence[Any]) -> bool:
    """Return whether any of these values is a tensor of a ``torch.func`` transform, which may be over."""
    for value in values:
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            return True
    return False


def has_tangent(value: Any) -> bool:
    """Return whether a value is a tensor that carries a derivative in forward mode."""
    return isinstance(value, Tensor) and in_forward_ad() and forward_ad.unpack_dual(value).tangent is not None


def is_batched(tensor: Tensor) -> bool:
    """Return whether ``vmap`` runs over a tensor, at any level of transforms."""
    if is_legacy_batchedtensor(tensor):
        return True
    if not is_functorch_wrapped_tensor(tensor):
        return False
    return "Vmap" in _transforms()


def _transforms() -> list[str]:
    """Return the names of the transforms of ``torch.func`` that the caller runs inside."""
    return [transform.key().name for transform in get_interpreter_stack() or ()]
