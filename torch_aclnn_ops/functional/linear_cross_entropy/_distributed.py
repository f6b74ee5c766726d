"""Calls on several processes: sums and gathers with every derivative, and DTensors as this process's tensors.

A tensor is either a part (each process has another one) or a copy (all have the same). Every process computes the same
loss, so the gradient of a copy is a copy, and that of a part is a part. ``gather`` and ``own_part`` are each other's
derivative, and so are ``copy_to_group`` and ``sum_over_group``.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_aclnn_ops._torch_compat import c10d_functional
from torch_aclnn_ops.ops._derivatives import in_functorch_transform
from torch_aclnn_ops.ops._differentiable import EagerOrCompiled
from torch_aclnn_ops.ops._numerics import widen

import torch
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


_REMEDY = "redistribute it, or give every argument's full_tensor()"


class DTensorArguments(NamedTuple):
    """The arguments of ``linear_cross_entropy`` that a DTensor may be, or decides about."""

    input: Any
    linear_weight: Any
    target: Any
    linear_bias: Any
    weight: Any
    token_weight: Any
    process_group: Any
    vocab_sizes: Sequence[int] | None


def local_arguments(given: DTensorArguments, reduce_input_grad: bool) -> DTensorArguments:
    """Return this process's tensors of a call with DTensors, and the cut of its vocabulary; other calls as they are.

    A head with the placement ``Shard(0)`` on a mesh of one dimension is vocab-parallel over the mesh's group, and so is
    its bias. The gradients of DTensors are DTensors with the same placements. Plain tensors are taken for copies that
    all ranks have, as ``Replicate()`` says of a DTensor.

    Args:
        given: the arguments of the call.
        reduce_input_grad: whether the input's gradient is whole on every rank, or a ``Partial()`` one.

    Raises:
        ValueError: placements, meshes, ``process_group`` or ``vocab_sizes`` do not fit each other.
    """
    tensors = given._asdict()
    dtensors: dict[str, DTensor] = {name: tensor for name, tensor in tensors.items() if _is_dtensor(tensor)}
    if not dtensors:
        return given
    from torch.distributed.tensor import Partial, Replicate, Shard

    head = dtensors.get("linear_weight")
    if head is None:
        name, tensor = next(iter(dtensors.items()))
        raise ValueError(
            f"linear_cross_entropy: {name} must be a plain tensor where linear_weight is one, but it is a DTensor with"
            f" placements {_said(tensor)}; give its to_local() or full_tensor(), or shard linear_weight by Shard(0)"
        )
    mesh = head.device_mesh
    if mesh.ndim != 1 or head.placements != (Shard(0),):
        raise ValueError(
            "linear_cross_entropy: linear_weight must be a plain tensor, or a DTensor with placements (Shard(dim=0),)"
            f" on a mesh of one dimension, but it has placements {_said(head)} on a mesh of shape {tuple(mesh.shape)};"
            f" {_REMEDY}"
        )
    if isinstance(given.linear_bias, Tensor) and "linear_bias" not in dtensors:
        raise ValueError(
            "linear_cross_entropy: linear_bias must be a DTensor with placements (Shard(dim=0),), as linear_weight is,"
            " but it is a plain tensor; distribute it with torch.distributed.tensor.distribute_tensor"
        )
    for name, tensor in dtensors.items():
        accepted = (Shard(0),) if name in ("linear_weight", "linear_bias") else (Replicate(),)
        if tensor.device_mesh != mesh or tensor.placements != accepted:
            raise ValueError(
                f"linear_cross_entropy: {name} must have placements {accepted} on linear_weight's mesh, but it has"
                f" placements {_said(tensor)} on {tensor.device_mesh}; {_REMEDY}"
            )
    group = mesh.get_group()
    if given.process_group is not None and given.process_group != group:
        raise ValueError(
            "linear_cross_entropy: process_group must be None, or the group of linear_weight's mesh, where"
            f" linear_weight is a DTensor, but it is {given.process_group!r}"
        )
    sizes = _sizes_of_chunks(head.shape[0], mesh.size())
    if given.vocab_sizes is not None and tuple(given.vocab_sizes) != sizes:
        raise ValueError(
            f"linear_cross_entropy: vocab_sizes must be None or {sizes}, as linear_weight's placements cut it, but it"
            f" is {given.vocab_sizes!r}"
        )
    of_input = None if reduce_input_grad else [Partial()]
    local = {
        name: tensor.to_local(grad_placements=of_input if name == "input" else None)
        for name, tensor in dtensors.items()
    }
    if local["linear_weight"].shape[0] != sizes[mesh.get_local_rank()]:
        raise ValueError(
            f"linear_cross_entropy: linear_weight must be cut as torch.chunk cuts it, in {sizes} rows, but it has"
            f" {local['linear_weight'].shape[0]} rows on rank {mesh.get_local_rank()}; give its to_local() with"
            " process_group and vocab_sizes"
        )
    return DTensorArguments(**{**tensors, **local, "process_group": group, "vocab_sizes": sizes})


def _is_dtensor(value: Any) -> bool:
    # The import takes a second, and without it there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _said(tensor: "DTensor") -> str:
    return str(tensor.placements)


def _sizes_of_chunks(rows: int, ranks: int) -> tuple[int, ...]:
    size = -(-rows // ranks)
    return tuple(max(min(size, rows - rank * size), 0) for rank in range(ranks))
