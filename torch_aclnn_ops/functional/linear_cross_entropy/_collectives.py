"""Sums over, and gathers from, the processes that share a vocabulary, with every derivative.

A tensor is either a part (each process has another one) or a copy (all have the same). Every process computes the same
loss, so the gradient of a copy is a copy, and that of a part is a part. ``gather`` and ``own_part`` are each other's
derivative, and so are ``copy_to_group`` and ``sum_over_group``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_aclnn_ops._torch_compat import c10d_functional
from torch_aclnn_ops.ops._derivatives import in_functorch_transform
from torch_aclnn_ops.ops._differentiable import EagerOrCompiled
from torch_aclnn_ops.ops._numerics import widen

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Members:
    """The processes of a group, as constants of autograd and of ``torch.compile``.

    Attributes:
        name: by which PyTorch finds the group.
        size: number of processes.
        rank: of this process in the group.
        devices: types of device whose tensors the group takes; tensors of others go through the CPU.
    """

    name: str
    size: int
    rank: int
    devices: tuple[str, ...]

    def stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor where the group takes it."""
        return tensor.contiguous() if tensor.device.type in self.devices else tensor.contiguous().cpu()


_Collective = Callable[[Tensor, Members], Tensor]


def gather(part: Tensor, members: Members) -> Tensor:
    """Stack the parts of all processes, in the order of ranks, along a new first dimension."""
    result: Tensor = _Gather(part, members)
    return result


def own_part(whole: Tensor, members: Members) -> Tensor:
    """Return this process's entry of the first dimension of a copy."""
    result: Tensor = _OwnPart(whole, members)
    return result


def copy_to_group(copy: Tensor, members: Members) -> Tensor:
    """Return the tensor as it is; its gradient becomes the sum of those that the processes have of it."""
    result: Tensor = _CopyToGroup(copy, members)
    return result


def sum_over_group(part: Tensor, members: Members) -> Tensor:
    """Add up the parts of all processes, 16-bit ones in float32."""
    result: Tensor = _SumOverGroup(part, members)
    return result


def gather_constant(part: Tensor, members: Members) -> Tensor:
    """Stack the parts of all processes along a new first dimension, without derivatives."""
    gathered = c10d_functional.all_gather_into_tensor(members.stage(part.unsqueeze(0)), members.size, members.name)
    result: Tensor = c10d_functional.wait_tensor(gathered).to(part.device)
    return result


def _own_part(whole: Tensor, members: Members) -> Tensor:
    return whole[members.rank].clone()


def _copy_to_group(copy: Tensor, members: Members) -> Tensor:
    return copy.view_as(copy)


def _sum_over_group(part: Tensor, members: Members) -> Tensor:
    total = c10d_functional.all_reduce(members.stage(widen(part)), "sum", members.name)
    result: Tensor = c10d_functional.wait_tensor(total).to(part)
    return result


def refuse_compiled_transform(*_: Any) -> None:
    """Raise where dynamo traces a transform: it takes all but the first derivative of a Function for zero."""
    if torch.compiler.is_compiling() and in_functorch_transform():
        raise NotImplementedError(
            "linear_cross_entropy: process_group must be None where torch.compile traces a transform of torch.func,"
            " which cannot differentiate collectives there; compile without the transform, or transform without"
            " compiling"
        )


def _with_derivatives(
    itself: Callable[[], _Collective], forward: _Collective, adjoint: _Collective, adjoint_forward: _Collective
) -> EagerOrCompiled:
    """Make a linear function differentiable.

    Args:
        itself: returns the differentiable function.
        forward: computes it.
        adjoint: differentiable function that maps the result's gradient to the tensor's.
        adjoint_forward: computes that.
    """

    class Linear(Function):
        @staticmethod
        def forward(tensor: Tensor, members: Members) -> Tensor:
            return forward(tensor, members)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, ctx.members = inputs

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
            # Dynamo traces no Function inside another's backward, and compiled code has no second derivative.
            differentiate = adjoint_forward if torch.compiler.is_compiling() else adjoint
            return differentiate(grad_output, ctx.members), None

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
            return itself()(tangent, ctx.members)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int, None], tensor: Tensor, members: Members) -> tuple[Tensor, int]:
            # The first dimension may be the ranks'.
            result = itself()(tensor.movedim(in_dims[0], -1), members)
            return result, result.dim() - 1

    return EagerOrCompiled(Linear, refuse_compiled_transform)


_Gather = _with_derivatives(lambda: gather, gather_constant, own_part, _own_part)
_OwnPart = _with_derivatives(lambda: own_part, _own_part, gather, gather_constant)
_CopyToGroup = _with_derivatives(lambda: copy_to_group, _copy_to_group, sum_over_group, _sum_over_group)
_SumOverGroup = _with_derivatives(lambda: sum_over_group, _sum_over_group, copy_to_group, _copy_to_group)
