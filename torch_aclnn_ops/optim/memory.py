"""Checks of the parameters: whether their memory has changed, matches the states, is not shared, and holds reals."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any

from torch_aclnn_ops._cpu_extension import holds, placement
from torch_aclnn_ops._tensors import extent, first_overlap, is_plain, local
from torch_aclnn_ops._torch_npu import has_private_format
from torch_aclnn_ops.optim.flat import can_flatten
from torch_aclnn_ops.optim.state import TENSOR_STATES, check_shape

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_Groups = Sequence[dict[str, Any]]


class Placement:
    """A snapshot of the addresses, dtypes, shapes and strides of an optimizer's parameters."""

    def __init__(self) -> None:
        self.remember([])

    def remember(self, groups: _Groups) -> None:
        """Take a snapshot of the parameters."""
        self._params: list[Tensor] = [param for group in groups for param in group["params"]]
        self._plain: list[Tensor] = []
        self._others: list[Tensor] = []
        for param in self._params:
            is_usual = is_plain(param) and has_memory(param) and param.numel() > 0
            (self._plain if is_usual else self._others).append(param)
        self._placement = placement(self._plain)
        self._locations = list(map(_location, self._others))

    def is_current(self, groups: _Groups) -> bool:
        """Return whether the parameters match the snapshot."""
        return (
            holds([group["params"] for group in groups], self._params)
            and placement(self._plain) == self._placement
            and all(map(eq, map(_location, self._others), self._locations))
        )


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has an address; subclasses with ``__torch_dispatch__``, such as fake tensors, may not."""
    if not is_plain(tensor) and (type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_lazy(tensor)):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta


def _location(param: Tensor) -> object:
    tensor = local(param)
    return (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device) if has_memory(tensor) else None


def keep_once(group: dict[str, Any]) -> None:
    """Remove the repetitions of parameters from a group: a step updates each of them once."""
    first = {id(param): i for i, param in reversed(list(enumerate(group["params"])))}
    for name in ("params", "param_names"):
        if name in group:
            group[name] = [group[name][i] for i in sorted(first.values())]


def check_memory(groups: _Groups, states: Mapping[Tensor, Any]) -> None:
    """Raise if a parameter does not match its storage, gradient or state, or shares memory with another one."""
    for param, name in _named(groups):
        state = states.get(param, {})
        if param.grad is not None or state:  # otherwise it is not used
            _check_storage(param, name)
            tensors = {"the gradient": param.grad, **{repr(key): state.get(key) for key in TENSOR_STATES}}
            for key, value in tensors.items():
                if isinstance(value, Tensor):
                    check_shape(key, value, param, name)
    check_no_shared_memory(groups)


def check_formats(groups: _Groups, states: Mapping[Tensor, Any], flatten: bool) -> None:
    """Raise if a parameter that is used is in a private format; one that can be flattened is copied."""
    for param, name in _named(groups):
        is_used = (param.grad is not None or states.get(param)) and has_memory(local(param))
        if is_used and has_private_format(local(param)) and not (flatten and can_flatten(param)):
            raise RuntimeError(
                f"FusedEmaAdam: {name} must not be in a private format such as FRACTAL_NZ, in which CANN's operator"
                " cannot write it; assign param.data = torch_npu.npu_format_cast(param.data, 2) before the step"
            )


def check_no_shared_memory(groups: _Groups) -> None:
    """Raise if the memory of two parameters overlaps; interleaved parameters do not."""
    _check_disjoint(
        _named(groups),
        "to tie weights, register one Parameter in both modules (b.weight = a.weight), not its data (b.weight.data ="
        " a.weight.data)",
    )


def check_no_shared_states(groups: _Groups, states: Mapping[Tensor, Any]) -> None:
    """Raise if the memory of a state overlaps that of another one, or of a parameter."""
    named = (
        (value, f"{name} of {of}")
        for param, of in _named(groups)
        for name, value in {"the data": param, **states.get(param, {})}.items()
        if name in ("the data", *TENSOR_STATES)
    )
    _check_disjoint(named, "load or assign clones")


def _check_disjoint(named: Iterable[tuple[Tensor, str]], cure: str) -> None:
    tensors, names = [], []
    for one, name in named:
        tensor = local(one)
        if has_memory(tensor) and tensor.numel() > 0 and tensor.data_ptr() != 0:
            tensors.append(tensor)
            names.append(name)
    shared = first_overlap(tensors)
    if shared is not None:
        first, second = (names[i] for i in shared)
        raise ValueError(
            f"FusedEmaAdam: {first} and {second} share memory, so that the update of one would overwrite that of the"
            f" other; {cure}"
        )


def _named(groups: _Groups) -> Iterator[tuple[Tensor, str]]:
    for i, group in enumerate(groups):
        names = group.get("param_names")
        for j, param in enumerate(group["params"]):
            yield param, f"parameter {names[j]!r}" if names else f"parameter {j} of group {i}"


def _check_storage(param: Tensor, name: str) -> None:
    tensor = local(param)
    if not has_memory(tensor) or tensor.numel() == 0:
        return
    needed = tensor.storage_offset() * tensor.itemsize + extent(tensor)
    if needed > tensor.untyped_storage().nbytes():
        # What FSDP2 frees are the unsharded parameters, which a model has after a forward pass.
        is_freed = is_plain(param) and tensor.untyped_storage().nbytes() == 0
        hint = ". With FSDP2, create the optimizer after fully_shard() and before the first forward pass"
        raise RuntimeError(
            f"FusedEmaAdam: {name} needs {needed} bytes for its shape {list(tensor.shape)}, but its storage has"
            f" {tensor.untyped_storage().nbytes()}; restore its storage before the step{hint if is_freed else ''}"
        )
