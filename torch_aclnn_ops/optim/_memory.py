"""The memory of parameters: whether it has moved, fits their states, and belongs to one parameter alone."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch_aclnn_ops.ops.ema_adam.kernels import is_plain, local
from torch_aclnn_ops.optim._states import AVERAGES

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_Groups = Sequence[dict[str, Any]]
_shape_of: Callable[[Tensor], object] = attrgetter("shape")
_dtype_of: Callable[[Tensor], object] = attrgetter("dtype")


class Placement:
    """Where the parameters of an optimizer were, and of which dtype and shape, when it last looked."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._types: list[type] = []
        self._plain: list[Tensor] = []
        self._others: list[Tensor] = []
        self._found: list[object] = []

    def remember(self, groups: _Groups) -> None:
        """Look at the parameters of groups."""
        self._params = [param for group in groups for param in group["params"]]
        self._types = list(map(type, self._params))
        self._plain, self._others = [], []
        for param in self._params:
            is_usual = is_plain(param) and _has_memory(param) and param.numel() > 0
            (self._plain if is_usual else self._others).append(param)
        self._found = self._look()

    def is_current(self, groups: _Groups) -> bool:
        """Return whether these are the same parameters, in the same places."""
        params = [param for group in groups for param in group["params"]]
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and list(map(type, params)) == self._types
            and self._look() == self._found
        )

    def _look(self) -> list[object]:
        # In C where that can be: every step does it. Another device is another address, but for what has none.
        usual = (map(look, self._plain) for look in (Tensor.data_ptr, _shape_of, _dtype_of))
        return [*chain.from_iterable(usual), *map(_place_of, self._others)]


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has an address: subclasses that dispatch, such as fake tensors, may have none."""
    if not is_plain(tensor) and (type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_lazy(tensor)):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta


def _place_of(param: Tensor) -> object:
    tensor = local(param)
    return (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device) if _has_memory(tensor) else None


def check_memory(groups: _Groups, states: Mapping[Tensor, Any]) -> None:
    """Raise where a parameter has outgrown its memory, its gradient or its state, or shares memory with another one."""
    for param, name in _named(groups):
        state = states.get(param, {})
        if param.grad is not None or state:  # is read or written
            _check_storage(param, name)
            _check_shapes(param, name, state)
    check_no_shared_memory(groups)


def check_no_shared_memory(groups: _Groups) -> None:
    """Raise where two parameters have an element in the same memory; interleaved ones have none."""
    tensors, names = [], []
    for param, name in _named(groups):
        tensor = local(param)
        if _has_memory(tensor) and tensor.numel() > 0 and tensor.data_ptr() != 0:
            tensors.append(tensor)
            names.append(name)
    shared = _first_shared(tensors)
    if shared is not None:
        first, second = (names[i] for i in sorted(shared))
        raise ValueError(
            f"FusedEmaAdam: {first} and {second} share memory, in which the update of one would overwrite that of the"
            " other; to tie weights, register one Parameter in both modules (b.weight = a.weight), not its data"
            " (b.weight.data = a.weight.data)"
        )


def _named(groups: _Groups) -> Iterator[tuple[Tensor, str]]:
    for i, group in enumerate(groups):
        names = group.get("param_names")
        for j, param in enumerate(group["params"]):
            yield param, f"parameter {names[j]!r}" if names else f"parameter {j} of group {i}"


def _check_storage(param: Tensor, name: str) -> None:
    tensor = local(param)
    if not _has_memory(tensor) or tensor.numel() == 0:
        return
    needed = tensor.storage_offset() * tensor.itemsize + _extent(tensor)
    if needed > tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"FusedEmaAdam: {name} needs {needed} bytes for its shape {list(tensor.shape)}, but its storage has"
            f" {tensor.untyped_storage().nbytes()}; restore its storage before the step"
        )


def _check_shapes(param: Tensor, name: str, state: Mapping[str, Any]) -> None:
    if param.grad is not None and param.grad.shape != param.shape:
        raise RuntimeError(
            f"FusedEmaAdam: {name} has the shape {list(param.shape)}, but its gradient has {list(param.grad.shape)};"
            " compute the gradient anew"
        )
    for key in AVERAGES:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape != param.shape:
            raise RuntimeError(
                f"FusedEmaAdam: {name} has the shape {list(param.shape)}, but its {key!r} in optimizer.state has"
                f" {list(value.shape)}; after a change of shape build a new optimizer, or start the state of this"
                " parameter anew with `del optimizer.state[param]`"
            )


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _first_shared(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two tensors that have an element in the same memory, if there are some."""
    for cluster in _clusters(tensors):
        second = _first_in_memory_of_earlier(cluster, tensors)
        if second is not None:
            earlier = cluster[: cluster.index(second)]
            return next((i, second) for i in earlier if _first_in_memory_of_earlier([i, second], tensors) is not None)
    return None


def _clusters(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Return the indices of tensors that begin before the end of another one, together with this."""
    by_memory = defaultdict(list)
    for i, tensor in enumerate(tensors):
        # On a CPU several storages may be over the same memory, by DLPack.
        memory = 0 if tensor.is_cpu else tensor.untyped_storage().data_ptr()
        by_memory[tensor.device, memory].append((tensor.data_ptr(), i))
    for members in by_memory.values():
        cluster: list[int] = []
        end = 0
        for begin, i in sorted(members):
            if begin >= end:
                if len(cluster) > 1:
                    yield cluster
                cluster = []
            cluster.append(i)
            end = max(end, begin + _extent(tensors[i]))
        if len(cluster) > 1:
            yield cluster


def _first_in_memory_of_earlier(cluster: Sequence[int], tensors: Sequence[Tensor]) -> int | None:
    """Return the first member of a cluster with an element in the memory of an earlier one; marks what is taken."""
    members = [tensors[i] for i in cluster]
    start = min(tensor.data_ptr() for tensor in members)
    end = max(tensor.data_ptr() + _extent(tensor) for tensor in members)
    unit = math.gcd(*(tensor.data_ptr() - start for tensor in members), *(tensor.itemsize for tensor in members))
    is_taken = torch.zeros((end - start) // unit, dtype=torch.bool, device="cpu")
    for i, tensor in zip(cluster, members, strict=True):
        units = tensor.itemsize // unit
        sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        strides = [stride * units for stride in tensor.stride()]
        place = is_taken.as_strided((*sizes, units), (*strides, 1), (tensor.data_ptr() - start) // unit)
        if place.any():
            return i
        place.fill_(True)
    return None
