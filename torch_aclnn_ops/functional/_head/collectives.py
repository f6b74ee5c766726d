"""Differentiable collectives.

A tensor is either a part (different on each rank) or a copy (the same on all ranks). Every rank computes the same loss,
so the gradient of a copy is a copy, and that of a part is a part. ``gather`` and ``own_part`` are each other's
derivative, and so are ``copy_to_group`` and ``sum_over_group``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform
from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled
from torch_aclnn_ops._tensors import widen
from torch_aclnn_ops._torch_compat.private import c10d_functional, device_types_of_group, is_legacy_batchedtensor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Members:
    """The members of a process group, as a constant of autograd and ``torch.compile``."""

    name: str  # of the group
    size: int  # world size of the group
    rank: int  # of this process in the group
    devices: tuple[str, ...]  # device types that the group's backends support; other tensors are copied to the CPU

    @classmethod
    def of(cls, function: str, process_group: Any) -> "Members":
        """Return the members of a process group, which must contain this process."""
        if not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"{function}: process_group must be None or a torch.distributed.ProcessGroup that contains this"
                f" process, but it is {process_group!r}"
            )
        name = process_group.group_name
        return cls(name, process_group.size(), process_group.rank(), device_types_of_group(name))

    def stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor contiguous, on a device that the group supports."""
        if not torch.compiler.is_compiling() and is_legacy_batchedtensor(tensor):
            raise NotImplementedError(
                "process_group must be None in a backward pass with is_grads_batched=True, which does not batch"
                " collectives; use torch.func.vmap, or a backward pass for each gradient"
            )
        return tensor.contiguous() if tensor.device.type in self.devices else tensor.contiguous().cpu()


_Collective = Callable[[Tensor, Members], Tensor]


def gather_constant(part: Tensor, members: Members) -> Tensor:
    """Stack the parts of all ranks along a new first dimension; not differentiable."""
    gathered = c10d_functional.all_gather_into_tensor(members.stage(part.unsqueeze(0)), members.size, members.name)
    result: Tensor = c10d_functional.wait_tensor(gathered).to(part.device)
    return result


def _own_part(whole: Tensor, members: Members) -> Tensor:
    return whole[members.rank].clone()


def _copy_to_group(copy: Tensor, members: Members) -> Tensor:
    return copy.view_as(copy)


def _sum_over_group(part: Tensor, members: Members) -> Tensor:
    if part.dtype == torch.float64 and part.device.type == "npu":  # HCCL gathers float64, but does not reduce it
        return gather_constant(part, members).sum(0)
    sent = members.stage(widen(part))
    is_own = sent is not part and not torch.compiler.is_compiling()
    all_reduce = c10d_functional.all_reduce_ if is_own else c10d_functional.all_reduce  # the latter clones
    total = all_reduce(sent, "sum", members.name)
    result: Tensor = c10d_functional.wait_tensor(total).to(part)
    return result


def raise_if_compiled_transform(*_: Any) -> None:
    """Raise where Dynamo traces a transform, in which second derivatives of a Function would be zero."""
    if torch.compiler.is_compiling() and in_functorch_transform():
        raise NotImplementedError(
            "linear_cross_entropy: process_group must be None where torch.compile traces a transform of torch.func,"
            " which cannot differentiate collectives there; compile without the transform, or transform without"
            " compiling"
        )


def _linear(
    forward: _Collective, itself: Callable[[], Any], adjoint_forward: _Collective, adjoint: Callable[[], Any]
) -> EagerOrCompiled:
    """Make a linear function differentiable; ``itself`` and ``adjoint`` return the differentiable functions."""

    class Linear(Function):
        @staticmethod
        def forward(tensor: Tensor, members: Members) -> Tensor:
            return forward(tensor, members)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, ctx.members = inputs

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
            # Dynamo does not trace a Function in another's backward, and compiled code is not differentiated twice.
            differentiate = adjoint_forward if torch.compiler.is_compiling() else adjoint()
            return differentiate(grad_output, ctx.members), None

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
            return itself()(tangent, ctx.members)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int, None], tensor: Tensor, members: Members) -> tuple[Tensor, int]:
            # The first dimension may be that of the ranks.
            result = itself()(tensor.movedim(in_dims[0], -1), members)
            return result, result.dim() - 1

    return EagerOrCompiled(Linear, raise_if_compiled_transform)


# Stacks the parts of all ranks along a new first dimension; selects this rank's entry along it.
gather: Any = _linear(gather_constant, lambda: gather, _own_part, lambda: own_part)
own_part: Any = _linear(_own_part, lambda: own_part, gather_constant, lambda: gather)
# The identity, whose gradient is summed over ranks; the sum over ranks, whose gradient is the identity.
copy_to_group: Any = _linear(_copy_to_group, lambda: copy_to_group, _sum_over_group, lambda: sum_over_group)
sum_over_group: Any = _linear(_sum_over_group, lambda: sum_over_group, _copy_to_group, lambda: copy_to_group)
