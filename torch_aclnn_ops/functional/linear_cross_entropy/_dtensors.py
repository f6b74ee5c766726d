"""A call with DTensors as one with this process's tensors: a head that is sharded by classes is vocab-parallel."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_REMEDY = "redistribute it, or give every argument's full_tensor()"


class Arguments(NamedTuple):
    """The arguments of ``linear_cross_entropy`` that a DTensor may be, or decides about."""

    input: Any
    linear_weight: Any
    target: Any
    linear_bias: Any
    weight: Any
    token_weight: Any
    process_group: Any
    vocab_sizes: Sequence[int] | None


def local_arguments(given: Arguments, reduce_input_grad: bool) -> Arguments:
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
    return Arguments(**{**tensors, **local, "process_group": group, "vocab_sizes": sizes})


def _is_dtensor(value: Any) -> bool:
    # The import takes a second, and without it there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _said(tensor: "DTensor") -> str:
    return str(tensor.placements)


def _sizes_of_chunks(rows: int, ranks: int) -> tuple[int, ...]:
    size = -(-rows // ranks)
    return tuple(max(min(size, rows - rank * size), 0) for rank in range(ranks))
