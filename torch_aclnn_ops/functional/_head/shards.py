"""The shards of a vocabulary on the ranks of a process group, and differentiable collectives.

A tensor is either a part (different on each rank) or a copy (the same on all ranks). Every rank computes the same loss,
so the gradient of a copy is a copy, and that of a part is a part. ``gather`` and ``own_part`` are each other's
derivative, and so are ``copy_to_group`` and ``sum_over_group``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._autograd.derivatives import in_functorch_transform, is_exporting
from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled
from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._tensors import widen
from torch_aclnn_ops._torch_compat.private import (
    c10d_functional,
    device_types_of_group,
    dtensor_of_local,
    is_legacy_batchedtensor,
)
from torch_aclnn_ops._torch_compat.public import COMPILES_COLLECTIVES
from torch_aclnn_ops.functional._head.agreement import ROWS, raise_mismatch

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


def raise_if_not_compilable(*_: Any) -> None:
    """Raise where Dynamo would drop derivatives: first ones in torch 2.11, second ones of a Function in transforms."""
    if not torch.compiler.is_compiling():
        return
    if not COMPILES_COLLECTIVES:
        raise NotImplementedError(
            "linear_cross_entropy: process_group must be None under torch.compile with torch 2.11, whose compiled code"
            " drops the gradients of collectives; use another version of torch, or do not compile this call"
        )
    if in_functorch_transform():
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

    return EagerOrCompiled(Linear, raise_if_not_compilable)


# Stacks the parts of all ranks along a new first dimension; selects this rank's entry along it.
gather: Any = _linear(gather_constant, lambda: gather, _own_part, lambda: own_part)
own_part: Any = _linear(_own_part, lambda: own_part, gather_constant, lambda: gather)
# The identity, whose gradient is summed over ranks; the sum over ranks, whose gradient is the identity.
copy_to_group: Any = _linear(_copy_to_group, lambda: copy_to_group, _sum_over_group, lambda: sum_over_group)
sum_over_group: Any = _linear(_sum_over_group, lambda: sum_over_group, _copy_to_group, lambda: copy_to_group)


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
    if is_exporting():
        raise NotImplementedError(
            f"{function}: process_group must be None under torch.export, which exports no gradients of collectives, but"
            " it is given; use torch.compile"
        )
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
