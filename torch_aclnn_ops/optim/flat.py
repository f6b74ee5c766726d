"""Flattened parameters: the buffers of a parameter group, and which parameters they hold."""

from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any

from torch_aclnn_ops._cpu_extension import holds
from torch_aclnn_ops._torch_compat.private import is_in_fsdp1_unit
from torch_aclnn_ops.ops.ema_adam.lists import is_dense, is_plain
from torch_aclnn_ops.optim.flat_buffer import FlatBuffer
from torch_aclnn_ops.optim.state import dtype_of_states

import torch
from torch import Tensor


class FlatGroup:
    """The buffers of a parameter group, and its parameters that cannot be flattened.

    Args:
        group: The parameter group.
        states: The optimizer's states.
    """

    def __init__(self, group: dict[str, Any], states: MutableMapping[Tensor, Any]) -> None:
        self._params, self._master_weights = list(group["params"]), group["master_weights"]
        by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        self.rest: list[Tensor] = []
        for param in self._params:
            listed = by_kind[param.dtype, param.device] if can_flatten(param) else self.rest
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

    def are_views(self, states: MutableMapping[Tensor, Any], have_moved: bool) -> bool:
        """Return whether parameters and states are views of the buffers, and no state is missing."""
        for buffer in self.buffers:
            buffer.all_states = states
        return all(
            (not have_moved or not buffer.moved_params()) and buffer.has_own_states() and not buffer.new_params()
            for buffer in self.buffers
        )


def can_flatten(param: Tensor) -> bool:
    """Return whether a parameter can be moved into a buffer.

    It cannot if it has no memory, belongs to FSDP1, which keeps views of it, or is a part of a larger storage.
    """
    if not is_plain(param) or is_in_fsdp1_unit(param) or param.numel() == 0 or param.layout != torch.strided:
        return False
    if not param.is_floating_point() or param.is_meta or not (param.requires_grad or param.grad is not None):
        return False
    return param.untyped_storage().nbytes() == param.nbytes and is_dense(param)
