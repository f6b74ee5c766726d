"""The options and the lists of tensors of a FusedEmaAdam step."""

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any, NamedTuple

from torch_aclnn_ops._tensors import is_dtensor, is_plain

import torch
from torch import Tensor
from torch.nn import Parameter


class Options(NamedTuple):
    """The options of a step; see :class:`torch_aclnn_ops.optim.FusedEmaAdam`."""

    lr: float | Tensor
    ema_decay: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    bias_correction: bool
    maximize: bool
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


class TensorLists(NamedTuple):
    """The tensors of a step, as lists with one entry per parameter.

    If ``params`` are master weights, ``rounded`` are the parameters that they are copied to; otherwise it is empty.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    ema_params: list[Tensor]
    steps: list[Tensor]
    rounded: list[Tensor]

    def select(self, selectors: list[bool]) -> "TensorLists":
        """Return the parameters whose selector is true."""
        return TensorLists(*(list(compress(tensors, selectors)) for tensors in self))

    def part(self, part: slice) -> "TensorLists":
        """Return a slice of the parameters."""
        return TensorLists(*(tensors[part] for tensors in self))

    def local(self) -> "TensorLists":
        """Return the local shards of all DTensors; the step is element-wise."""
        return TensorLists(*([local(tensor) for tensor in tensors] for tensors in self))


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Return whether :func:`is_plain` is true for all tensors."""
    if torch.compiler.is_compiling():
        return all(map(is_plain, tensors))
    return set(map(type, tensors)) <= {Tensor, Parameter}


def local(tensor: Any) -> Tensor:
    """Return the local shard of a ``DTensor``, or the tensor itself."""
    shard: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return shard


def mark_modified(params: Iterable[Tensor]) -> None:
    """Tell autograd that parameters change, so that a backward pass through their old values raises.

    torch's fused kernels for CPUs do not, nor does a write to the shard of a ``DTensor``.
    """
    params = list(params)
    if any(map(Tensor.is_inference, params)):
        params = [param for param in params if not param.is_inference()]
    torch.autograd.graph.increment_version(params)


def batches(params: list[Tensor], limit: int) -> Iterator[slice]:
    """Split a list into batches of at most ``limit`` elements; a larger parameter gets its own batch."""
    sizes = [param.numel() for param in params]
    if sum(sizes) <= limit:
        yield slice(0, len(params))
        return
    start = elements = 0
    for i, size in enumerate(sizes):
        if i > start and elements + size > limit:
            yield slice(start, i)
            start, elements = i, 0
        elements += size
    yield slice(start, len(params))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is non-overlapping and dense, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
