"""Flattened parameters: the buffers of a parameter group, and which parameters they hold."""

from bisect import bisect
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from typing import Any

from torch_aclnn_ops._cpu_extension import holds
from torch_aclnn_ops._torch_compat.fsdp import is_in_fsdp1_unit
from torch_aclnn_ops._torch_compat.optimizer import has_alias
from torch_aclnn_ops.ops.ema_adam.lists import is_dense, is_plain
from torch_aclnn_ops.optim.flat_buffer import FlatBuffer, is_shared
from torch_aclnn_ops.optim.memory import has_memory
from torch_aclnn_ops.optim.state import dtype_of_states

import torch
from torch import Tensor


class FlatGroup:
    """The buffers of a parameter group, and its parameters that cannot be flattened.

    Args:
        group: The parameter group.
        states: The optimizer's states.
        previous: What is replaced: its parameters share their storages with its buffers.
    """

    def __init__(
        self, group: dict[str, Any], states: MutableMapping[Tensor, Any], previous: "FlatGroup | None" = None
    ) -> None:
        self._params, self._master_weights = list(group["params"]), group["master_weights"]
        by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        self.rest: list[Tensor] = []
        for param in self._params:
            is_own = previous is not None and is_plain(param) and any(one.holds(param) for one in previous.buffers)
            listed = by_kind[param.dtype, param.device] if can_flatten(param, is_own) else self.rest
            listed.append(param)
        self.buffers: list[FlatBuffer] = [
            FlatBuffer(params, dtype_of_states(params[0], group["master_weights"]), states)
            for params in by_kind.values()
        ]

    def fits(self, group: dict[str, Any], have_moved: bool) -> bool:
        """Return whether the buffers are those of the group's parameters; shapes are compared if any have moved."""
        params = group["params"]
        return (
            group["master_weights"] == self._master_weights
            and holds([params], self._params)
            and (not have_moved or all(buffer.takes_params() for buffer in self.buffers))
        )

    def has_own_grads(self) -> bool:
        """Return whether all parameters are flattened and all gradients are views of their buffers."""
        return all([buffer.has_own_grads() for buffer in self.buffers]) and not self.rest  # each buffer notes it

    def foreign_grads(self) -> list[Tensor]:
        """Return the gradients that are not views of a buffer, and have an address."""
        of_rest = [param.grad for param in self.rest if param.grad is not None and has_memory(param.grad)]
        return [grad for buffer in self.buffers for grad in buffer.foreign_grads()] + of_rest

    def are_views(self, states: MutableMapping[Tensor, Any], have_moved: bool) -> bool:
        """Return whether parameters and states are views of the buffers, and no state is missing."""
        for buffer in self.buffers:
            buffer.all_states = states
        return all(
            (not have_moved or buffer.are_params_views()) and buffer.has_own_states() and not buffer.new_params()
            for buffer in self.buffers
        )


def flatten_groups(
    groups: Sequence[dict[str, Any]],
    flat_groups: MutableMapping[int, FlatGroup],
    states: MutableMapping[Tensor, Any],
    have_moved: bool,
) -> set[int]:
    """Make the buffers of groups; return which groups have parameters or states that are not views of them."""
    moved = set()
    for i, group in enumerate(groups):
        flat_group = flat_groups.get(i)
        if flat_group is None or not flat_group.fits(group, have_moved):
            flat_group = flat_groups[i] = FlatGroup(group, states, flat_group)
        if not flat_group.are_views(states, have_moved):
            moved.add(i)
    buffers = [buffer for i in range(len(groups)) for buffer in flat_groups[i].buffers]
    bounds = sorted(bound for buffer in buffers for bound in buffer.bounds)
    foreign = [grad for i in range(len(groups)) for grad in flat_groups[i].foreign_grads()]
    if moved or any(bisect(bounds, address) % 2 for address in map(Tensor.data_ptr, foreign)):
        _separate([param for group in groups for param in group["params"]], buffers, bounds, states)
    return moved


def _is_inside(bounds: Sequence[int], tensor: Tensor) -> bool:
    """Return whether a tensor lies in a buffer: an odd number of bounds is before it."""
    return has_memory(tensor) and bisect(bounds, tensor.data_ptr()) % 2 == 1


def _separate(
    params: Sequence[Tensor], buffers: Sequence[FlatBuffer], bounds: Sequence[int], states: MutableMapping[Tensor, Any]
) -> None:
    """Clone what a program has moved into a place of the buffers, before any place is written.

    So that parameters, also those that are not flattened, may exchange gradients, data and states.
    """
    places = {param: own for buffer in buffers for param, own in buffer.places().items()}
    for param in params:
        state: dict[str, Any] = states.get(param, {})
        for name, value in {"grad": param.grad, "data": param, **state}.items():
            if not isinstance(value, Tensor) or not _is_inside(bounds, value):
                continue
            if places.get(param, {}).get(name) == (value.data_ptr(), value.stride()):
                continue
            if name in state:
                state[name] = value.clone()
            elif name == "grad":
                param.grad = value.clone()
            else:
                param.data = value.detach().clone()


def can_flatten(param: Tensor, is_own: bool) -> bool:
    """Return whether a parameter can be moved into a buffer.

    It cannot if it has no memory, belongs to FSDP1, which keeps views of it, or shares its storage with another tensor
    or process, which would no longer alias it. ``is_own`` says that this is a buffer of this package.
    """
    if not is_plain(param) or is_in_fsdp1_unit(param) or param.numel() == 0 or param.layout != torch.strided:
        return False
    if not param.is_floating_point() or param.is_meta or not (param.requires_grad or param.grad is not None):
        return False
    if is_shared(param):
        return False
    # No variable holds the storage, because torch 2.9 counts that as a use.
    is_alone = param.untyped_storage().nbytes() == param.nbytes and not has_alias(param)
    return (is_own or is_alone) and is_dense(param)
