"""The shards of a vocabulary on the ranks of a process group."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._torch_compat.private import dtensor_of_local
from torch_aclnn_ops.functional._head.agreement import ROWS, raise_mismatch
from torch_aclnn_ops.functional._head.collectives import Members, gather_constant

import torch
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShards:
    """Contiguous shards of a vocabulary: rank r has ``sizes[r]`` classes, after those of the ranks before it."""

    members: Members
    sizes: tuple[int, ...]

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


def _gather_sizes(function: str, members: Members, local_rows: int, rows: int) -> tuple[int, ...]:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{function}: vocab_sizes must be given under torch.compile, because without it the number of"
            " classes of every rank is read from a collective; but it is None"
        )
    device = "cpu" if "cpu" in members.devices else members.devices[0]
    gathered = gather_constant(torch.tensor((local_rows, rows), device=device), members)
    if device == "npu":
        _extension.check_queue(function)  # otherwise uninitialized values could be read
    sizes, numbers = zip(*gathered.tolist(), strict=True)
    if len(set(numbers)) > 1:
        raise_mismatch(function, ROWS, str(rows))
    return tuple(sizes)


def _checked_sizes(function: str, vocab_sizes: Any, size: int) -> tuple[int, ...]:
    accepted = f"a sequence of {size} integers, the rows of linear_weight on each rank of process_group"
    if not isinstance(vocab_sizes, Sequence) or any(
        isinstance(entry, bool) or not isinstance(entry, Integral) for entry in vocab_sizes
    ):
        raise TypeError(f"{function}: vocab_sizes must be None or {accepted}, but it is {vocab_sizes!r}")
    if len(vocab_sizes) != size:
        raise ValueError(f"{function}: vocab_sizes must be {accepted}, but it is {vocab_sizes!r}")
    return tuple(int(entry) for entry in vocab_sizes)


def shards_of(
    function: str, process_group: Any, vocab_sizes: Sequence[int] | None, linear_weight: Any, input: Any
) -> VocabularyShards:
    """Return the shards of the vocabulary, after checking the arguments that describe them.

    Without ``vocab_sizes``, every call gathers the numbers of classes and rows of all ranks in a collective that
    synchronizes with the CPU; compiled code raises instead.
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
        rows = input.shape[:-1].numel() if isinstance(input, Tensor) else -1
        sizes = _gather_sizes(function, members, local_rows, rows)
    else:
        sizes = _checked_sizes(function, vocab_sizes, members.size)
    if min(sizes) < 1:
        raise ValueError(f"{function}: linear_weight must have a row on every rank, but the ranks have {sizes}")
    if sizes[members.rank] != local_rows:
        raise ValueError(
            f"{function}: vocab_sizes must have linear_weight's {local_rows} rows at rank {members.rank}, but it has"
            f" {sizes[members.rank]}: vocab_sizes is {sizes}"
        )
    return VocabularyShards(members, sizes)


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing them."""
    # Importing the module takes a second; if it is not imported, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_not_local_shard(function: str, remedy: str, **heads: Any) -> None:
    """Raise if autograd shows that a head, which must have all classes, is the local shard of a DTensor."""
    for name, head in heads.items():
        # Dynamo does not trace a grad_fn.
        if not isinstance(head, Tensor) or torch.compiler.is_compiling() or head.grad_fn is None:
            continue
        spec = dtensor_of_local(head)
        if spec is not None and spec.mesh.size() > 1 and not all(one.is_replicate() for one in spec.placements):
            raise ValueError(
                f"{function}: {name} must have all classes, but it is the to_local() of a DTensor with placements"
                f" {spec.placements}; {remedy}"
            )
