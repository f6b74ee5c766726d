"""What parameters and states were after the last step, and checks of their memory."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import eq
from typing import Any

from torch_aclnn_ops._cpu_extension import contents, holds, placement
from torch_aclnn_ops._tensors import extent, first_overlap, is_plain, local
from torch_aclnn_ops._torch_npu import has_private_format
from torch_aclnn_ops.optim.flat import can_flatten
from torch_aclnn_ops.optim.state import TENSOR_STATES, check_shape, has_state, states_of_params

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_Groups = Sequence[dict[str, Any]]


class Snapshot:
    """The parameters and states of an optimizer after a step: the objects, and where the parameters' memory is."""

    def __init__(self) -> None:
        self.is_valid = False  # not after a compiled step, nor before the first one

    def remember(self, groups: _Groups, states: MutableMapping[Any, Any]) -> None:
        """Take a snapshot."""
        self._dicts = [state for _, state in states_of_params(states)]
        self._objects = contents(self._containers(groups, states))
        params: list[Tensor] = [param for group in groups for param in group["params"]]
        self._without_state = [param for param in params if not has_state(states, param)]
        self._plain: list[Tensor] = []
        self._others: list[Tensor] = []
        for param in params:
            is_usual = is_plain(param) and has_memory(param) and param.numel() > 0
            (self._plain if is_usual else self._others).append(param)
        self._placement = placement(self._plain)
        self._locations = list(map(_location, self._others))
        self.is_valid = True

    def is_current(self, groups: _Groups, states: MutableMapping[Any, Any]) -> bool:
        """Return whether nothing has changed and no parameter gets its first gradient: a step then prepares nothing."""
        return (
            self.is_valid
            and holds(self._containers(groups, states), self._objects)
            and not any(param.grad is not None for param in self._without_state)
            and placement(self._plain) == self._placement
            and all(map(eq, map(_location, self._others), self._locations))
        )

    def _containers(self, groups: _Groups, states: MutableMapping[Any, Any]) -> list[Any]:
        """Return what is compared by identity; an option separates the parameters of two groups."""
        of_groups = [one for group in groups for one in (group["params"], [group["master_weights"]])]
        return [*of_groups, states, *self._dicts]


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
