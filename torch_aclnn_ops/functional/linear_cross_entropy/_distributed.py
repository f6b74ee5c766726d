"""Differentiable collectives, and conversion of DTensor arguments to local tensors.

A tensor is either sharded (different on each rank) or replicated (the same on all ranks). Every rank computes the same
loss, so the gradient of a replicated tensor is replicated, and that of a sharded tensor is sharded. ``gather`` and
``own_part`` are adjoint to each other, and so are ``copy_to_group`` and ``sum_over_group``.
"""

import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform
from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled
from torch_aclnn_ops._numerics import widen
from torch_aclnn_ops._torch_compat.distributed import c10d_functional, device_types_of_group, dtensor_of_local
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.torch_function import TorchArguments

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None


@dataclass(frozen=True)
class Members:
    """A process group as constants that autograd and ``torch.compile`` can handle."""

    name: str  # the name under which the group is registered
    size: int  # number of ranks
    rank: int  # rank of this process in the group
    devices: tuple[str, ...]  # device types that the group supports; tensors on others are copied to the CPU

    @classmethod
    def of(cls, process_group: Any) -> "Members":
        """Create it from a process group; raise if this process is not a member."""
        if isinstance(process_group, int) and process_group == _NO_MEMBER:
            rank = -1
        elif not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                "linear_cross_entropy: process_group must be None or a torch.distributed.ProcessGroup, but it is"
                f" {process_group!r}"
            )
        else:
            rank = process_group.rank()
        if rank < 0:
            raise ValueError(
                "linear_cross_entropy: process_group must contain this process, but it is a group of other ranks"
                " only; call it on the members of the group only"
            )
        name = process_group.group_name
        return cls(name, process_group.size(), rank, device_types_of_group(name))

    def stage(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor on a device that the group supports."""
        return tensor.contiguous() if tensor.device.type in self.devices else tensor.contiguous().cpu()


_Collective = Callable[[Tensor, Members], Tensor]


def gather_constant(part: Tensor, members: Members) -> Tensor:
    """Stack the shards of all ranks along a new first dimension, without autograd."""
    gathered = c10d_functional.all_gather_into_tensor(members.stage(part.unsqueeze(0)), members.size, members.name)
    result: Tensor = c10d_functional.wait_tensor(gathered).to(part.device)
    return result


def _own_part(replicated: Tensor, members: Members) -> Tensor:
    return replicated[members.rank].clone()


def _copy_to_group(copy: Tensor, members: Members) -> Tensor:
    return copy.view_as(copy)


def _sum_over_group(part: Tensor, members: Members) -> Tensor:
    if part.dtype == torch.float64 and part.device.type == "npu":  # HCCL can gather float64, but not reduce it
        return gather_constant(part, members).sum(0)
    total = c10d_functional.all_reduce(members.stage(widen(part)), "sum", members.name)
    result: Tensor = c10d_functional.wait_tensor(total).to(part)
    return result


def raise_if_compiled_transform(*_: Any) -> None:
    """Raise if Dynamo traces a transform, in which it treats higher derivatives of a Function as zero."""
    if torch.compiler.is_compiling() and in_functorch_transform():
        raise NotImplementedError(
            "linear_cross_entropy: process_group must be None where torch.compile traces a transform of torch.func,"
            " which cannot differentiate collectives there; compile without the transform, or transform without"
            " compiling"
        )


def _linear(
    forward: _Collective, itself: Callable[[], Any], adjoint_forward: _Collective, adjoint: Callable[[], Any]
) -> EagerOrCompiled:
    """Make a linear collective differentiable; ``itself`` and ``adjoint`` return the differentiable functions."""

    class Linear(Function):
        @staticmethod
        def forward(tensor: Tensor, members: Members) -> Tensor:
            return forward(tensor, members)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, ctx.members = inputs

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
            # Dynamo cannot trace a Function in another one's backward; compiled code has no second derivative.
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


# gather stacks the shards of all ranks along a new first dimension; own_part selects this rank's entry of it.
gather: Any = _linear(gather_constant, lambda: gather, _own_part, lambda: own_part)
own_part: Any = _linear(_own_part, lambda: own_part, gather_constant, lambda: gather)
# copy_to_group is the identity, whose backward sums over the ranks; sum_over_group is the sum over the ranks.
copy_to_group: Any = _linear(_copy_to_group, lambda: copy_to_group, _sum_over_group, lambda: sum_over_group)
sum_over_group: Any = _linear(_sum_over_group, lambda: sum_over_group, _copy_to_group, lambda: copy_to_group)


_FSDP_HINT = "if it is sharded by fully_shard (FSDP2), pass the model that owns it as fsdp_module"

_DTensorArguments = namedtuple(
    "_DTensorArguments", "input linear_weight target linear_bias weight token_weight process_group vocab_sizes"
)


def local_arguments(
    torch_arguments: TorchArguments,
    token_weight: Any,
    process_group: Any,
    vocab_sizes: Sequence[int] | None,
    reduce_input_grad: bool,
) -> tuple[TorchArguments, Any, Any, Sequence[int] | None]:
    """Convert DTensor arguments to local tensors, and return them with the process group and the shard sizes.

    A head with placement ``Shard(0)`` on a one-dimensional mesh, and its bias, are vocab-parallel over the mesh's group
    if ``process_group`` is given or the input is a DTensor on the same mesh. Otherwise it raises, because the shards of
    FSDP2 look the same, but every rank has different rows. The gradients of DTensors are DTensors with the same
    placements. Plain tensors are assumed to be replicated. Calls without DTensors are returned unchanged.

    ``reduce_input_grad``: whether the gradient of the input is reduced on every rank, instead of ``Partial()``.
    """
    given = _DTensorArguments(*torch_arguments[:5], token_weight, process_group, vocab_sizes)
    tensors = given._asdict()
    dtensors: dict[str, DTensor] = {name: tensor for name, tensor in tensors.items() if _is_dtensor(tensor)}
    if not dtensors:
        return torch_arguments, token_weight, process_group, vocab_sizes
    from torch.distributed.tensor import Partial, Replicate, Shard

    head = dtensors.get("linear_weight")
    if head is None:
        name, tensor = next(iter(dtensors.items()))
        raise ValueError(
            f"linear_cross_entropy: {name} must be a plain tensor if linear_weight is one, but it is a DTensor with"
            f" placements {tensor.placements}; pass its to_local() or full_tensor(), or shard linear_weight by Shard(0)"
        )
    mesh = head.device_mesh
    if mesh.ndim != 1 or head.placements != (Shard(0),):
        raise ValueError(
            "linear_cross_entropy: linear_weight must be a plain tensor, or a DTensor with placements (Shard(dim=0),)"
            f" on a mesh of one dimension, but it has placements {head.placements} on a mesh of shape"
            f" {tuple(mesh.shape)}; {_FSDP_HINT}, else redistribute it"
        )
    if given.process_group is None and "input" not in dtensors:
        raise ValueError(
            "linear_cross_entropy: linear_weight must be a plain tensor if input is one and neither process_group"
            f" nor fsdp_module is given, but it is a DTensor with placements {head.placements}, which is ambiguous:"
            f" {_FSDP_HINT}; if the ranks share the vocabulary, and all have the same input, pass the group of its mesh"
            " as process_group, or an input that is a DTensor with Replicate() on this mesh"
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
                f" placements {tensor.placements} on {tensor.device_mesh}; redistribute it"
            )
    group = mesh.get_group()
    if given.process_group is not None and given.process_group != group:
        Members.of(given.process_group)  # raises if this process is not a member
        # Equal meshes may have different groups.
        if dist.get_process_group_ranks(given.process_group) != dist.get_process_group_ranks(group):
            raise ValueError(
                "linear_cross_entropy: process_group must be None or the group of linear_weight's mesh if"
                f" linear_weight is a DTensor, but it is {given.process_group!r}"
            )
    sizes = _sizes_of_chunks(head.shape[0], mesh.size())
    if given.vocab_sizes is not None and tuple(given.vocab_sizes) != sizes:
        raise ValueError(
            f"linear_cross_entropy: vocab_sizes must be None or {sizes}, the shard sizes of linear_weight, but it"
            f" is {given.vocab_sizes!r}"
        )
    input_grad_placements = None if reduce_input_grad else [Partial()]
    local: dict[str, Any] = {
        name: tensor.to_local(grad_placements=input_grad_placements if name == "input" else None)
        for name, tensor in dtensors.items()
    }
    if local["linear_weight"].shape[0] != sizes[mesh.get_local_rank()]:
        raise ValueError(
            f"linear_cross_entropy: linear_weight must be sharded like torch.chunk, in {sizes} rows, but it has"
            f" {local['linear_weight'].shape[0]} rows on rank {mesh.get_local_rank()}; pass its to_local() with"
            " process_group and vocab_sizes"
        )
    token_weight = local.pop("token_weight", token_weight)
    return torch_arguments._replace(**local), token_weight, group, sizes


def check_not_local_shard(linear_weight: Tensor) -> None:
    """Raise if autograd shows that a head is the local shard of a DTensor, but no option says so."""
    spec = dtensor_of_local(linear_weight)
    if spec is not None and spec.mesh.size() > 1 and not all(one.is_replicate() for one in spec.placements):
        raise ValueError(
            "linear_cross_entropy: linear_weight must have all classes if neither process_group nor fsdp_module is"
            f" given, but it is the to_local() of a DTensor with placements {spec.placements}; {_FSDP_HINT}; if the"
            " ranks share the vocabulary, and all have the same input, pass process_group"
        )


def _is_dtensor(value: Any) -> bool:
    # Importing the module takes a second; if it is not imported, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _sizes_of_chunks(rows: int, ranks: int) -> tuple[int, ...]:
    size = -(-rows // ranks)
    return tuple(max(min(size, rows - rank * size), 0) for rank in range(ranks))
