"""The shards of a vocabulary on the ranks of a process group."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._torch_compat.distributed import dtensor_of_local
from torch_aclnn_ops.functional._head.agreement import check_messages
from torch_aclnn_ops.functional._head.collectives import Members, gather_constant

import torch
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShards:
    """Contiguous shards of a vocabulary: rank r has ``sizes[r]`` classes, after those of the ranks before it."""

    members: Members
    sizes: tuple[int, ...]
    excess: int = 0  # rows of this rank's head minus its size

    @property
    def total(self) -> int:
        """The size of the whole vocabulary."""
        return sum(self.sizes)

    def slices(self) -> list[slice]:
        """Return the range of classes of each rank."""
        return [slice(stop - size, stop) for stop, size in zip(accumulate(self.sizes), self.sizes, strict=True)]

    @property
    def own(self) -> slice:
        """The classes of this rank."""
        return self.slices()[self.members.rank]


def _gather_sizes(function: str, members: Members, local_rows: int, messages: dict[str, int]) -> tuple[int, ...]:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{function}: vocab_sizes must be given under torch.compile, because without it the number of"
            " classes of every rank is read from a collective; but it is None"
        )
    device = "cpu" if "cpu" in members.devices else members.devices[0]
    message = torch.tensor((local_rows, *messages.values()), device=device)
    gathered = gather_constant(message, members)
    if device == "npu":
        _extension.check_queue(function)  # otherwise uninitialized values could be read
    found = gathered.tolist()
    check_messages(function, messages, found)
    return tuple(sizes for sizes, *_ in found)


def _checked_sizes(function: str, vocab_sizes: Any, size: int) -> tuple[int, ...]:
    accepted = f"a sequence of {size} integers, the rows of linear_weight on each rank of process_group"
    if not isinstance(vocab_sizes, Sequence) or any(
        isinstance(entry, bool) or not isinstance(entry, Integral) for entry in vocab_sizes
    ):
        raise TypeError(f"{function}: vocab_sizes must be None or {accepted}, but it is {vocab_sizes!r}")
    if len(vocab_sizes) != size or any(entry < 0 for entry in vocab_sizes):
        raise ValueError(f"{function}: vocab_sizes must be {accepted}, but it is {vocab_sizes!r}")
    return tuple(int(entry) for entry in vocab_sizes)


def shards_of(
    function: str, process_group: Any, vocab_sizes: Sequence[int] | None, linear_weight: Any, messages: dict[str, int]
) -> VocabularyShards:
    """Return the shards of the vocabulary, after checking the arguments that describe them.

    Without ``vocab_sizes``, every call gathers the number of classes and ``messages`` of all ranks in a collective that
    synchronizes with the CPU; compiled code raises instead. ``messages`` is what determines the sizes and dtypes of
    messages, and so must be the same on all ranks, by its descriptions in errors.
    """
    if process_group is None:
        raise ValueError(f"{function}: vocab_sizes must be None if process_group is None, but it is {vocab_sizes!r}")
    if not isinstance(linear_weight, Tensor) or linear_weight.dim() < 2:
        is_tensor = isinstance(linear_weight, Tensor)
        described = f"has shape {list(linear_weight.shape)}" if is_tensor else f"is {describe(linear_weight)}"
        raise TypeError(
            f"{function}: linear_weight must be a Tensor of shape (rows of this rank, H) if process_group"
            f" is given, but it {described}"
        )
    members, local_rows = Members.of(function, process_group), linear_weight.shape[0]
    if vocab_sizes is None:
        sizes = _gather_sizes(function, members, local_rows, messages)
    else:
        sizes = _checked_sizes(function, vocab_sizes, members.size)
    if sum(sizes) == 0:
        raise ValueError(f"{function}: linear_weight must have a row on some rank, but it has none on any")
    return VocabularyShards(members, sizes, local_rows - sizes[members.rank])


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing them."""
    # Importing the module takes a second; if it is not imported, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_not_local_shard(function: str, name: str, weight: Tensor, condition: str, remedy: str) -> None:
    """Raise if autograd shows that a head is the local shard of a DTensor, but no option says so.

    Args:
        function: The name of the function.
        name: The name of the head.
        weight: The head.
        condition: When the head must have all classes.
        remedy: What to do if the head is sharded by FSDP2.
    """
    # Dynamo does not trace a grad_fn.
    spec = None if torch.compiler.is_compiling() or weight.grad_fn is None else dtensor_of_local(weight)
    if spec is not None and spec.mesh.size() > 1 and not all(one.is_replicate() for one in spec.placements):
        raise ValueError(
            f"{function}: {name} must have all classes if {condition}, but it is the to_local() of a DTensor with"
            f" placements {spec.placements}; {remedy}; if the ranks share the vocabulary, and all have the same input,"
            " pass process_group"
        )
