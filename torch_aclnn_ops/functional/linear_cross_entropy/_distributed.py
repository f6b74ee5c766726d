"""Calls with DTensors: this process's tensors, and the cut of the vocabulary that their placements say."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_aclnn_ops.functional._head.collectives import Members
from torch_aclnn_ops.functional._head.shards import check_not_local_shard, is_dtensor
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_FSDP_HINT = "if it is sharded by fully_shard (FSDP2), pass the model that owns it as fsdp_module"

_TENSORS = ("input", "linear_weight", "target", "linear_bias", "weight", "token_weight")


def local_arguments(
    call: Call, process_group: Any, vocab_sizes: Sequence[int] | None, reduce_input_grad: bool
) -> tuple[Call, Any, Sequence[int] | None]:
    """Convert DTensor arguments to local tensors, and return them with the process group and the shard sizes.

    A head with placement ``Shard(0)`` on a one-dimensional mesh, and its bias, are vocab-parallel over the mesh's group
    if ``process_group`` is given or the input is a DTensor on the same mesh. Otherwise it raises, because the shards of
    FSDP2 look the same, but every rank has different rows. The gradients of DTensors are DTensors with the same
    placements. Plain tensors are assumed to be replicated. Calls without DTensors are returned unchanged.

    ``reduce_input_grad``: whether the gradient of the input is reduced on every rank, instead of ``Partial()``.
    """
    tensors: dict[str, Any] = {name: getattr(call, name) for name in _TENSORS}
    dtensors: dict[str, DTensor] = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    if not dtensors:
        return call, process_group, vocab_sizes
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
    if process_group is None and "input" not in dtensors:
        raise ValueError(
            "linear_cross_entropy: linear_weight must be a plain tensor if input is one and neither process_group"
            f" nor fsdp_module is given, but it is a DTensor with placements {head.placements}, which is ambiguous:"
            f" {_FSDP_HINT}; if the ranks share the vocabulary, and all have the same input, pass the group of its mesh"
            " as process_group, or an input that is a DTensor with Replicate() on this mesh"
        )
    if isinstance(call.linear_bias, Tensor) and "linear_bias" not in dtensors:
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
    if process_group is not None and process_group != group:
        Members.of("linear_cross_entropy", process_group)  # raises if it is not a group of this process
        # Equal meshes may have groups of their own.
        if dist.get_process_group_ranks(process_group) != dist.get_process_group_ranks(group):
            raise ValueError(
                "linear_cross_entropy: process_group must be None or the group of linear_weight's mesh if"
                f" linear_weight is a DTensor, but it is {process_group!r}"
            )
    sizes = _sizes_of_chunks(head.shape[0], mesh.size())
    if vocab_sizes is not None and tuple(vocab_sizes) != sizes:
        raise ValueError(
            f"linear_cross_entropy: vocab_sizes must be None or {sizes}, the shard sizes of linear_weight, but it"
            f" is {vocab_sizes!r}"
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
    return call._replace(**local), group, sizes


def check_has_all_classes(linear_weight: Tensor) -> None:
    """Raise if autograd shows that a head is the local shard of a DTensor, but no option says so."""
    condition = "neither process_group nor fsdp_module is given"
    check_not_local_shard("linear_cross_entropy", "linear_weight", linear_weight, condition, _FSDP_HINT)


def _sizes_of_chunks(rows: int, ranks: int) -> tuple[int, ...]:
    size = -(-rows // ranks)
    return tuple(max(min(size, rows - rank * size), 0) for rank in range(ranks))
