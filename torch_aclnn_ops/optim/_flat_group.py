"""The flattened parameters of a parameter group."""

from collections import Counter, defaultdict
from collections.abc import MutableMapping
from operator import is_
from typing import Any

from torch_aclnn_ops._torch_compat.fsdp import is_in_fsdp1_unit
from torch_aclnn_ops._torch_compat.optimizer import has_alias, storage_uses, uses_of_one_tensor
from torch_aclnn_ops.ops.ema_adam.lists import is_dense, is_plain
from torch_aclnn_ops.optim._flat import FlatBuffer, storage_of
from torch_aclnn_ops.optim._states import dtype_of_states

import torch
from torch import Tensor


class FlatGroup:
    """The buffers of a parameter group, and its parameters that cannot be flattened; ``previous`` is replaced by it."""

    def __init__(
        self, group: dict[str, Any], states: MutableMapping[Tensor, Any], previous: "FlatGroup | None" = None
    ) -> None:
        self._params = list(group["params"])
        self._previous = previous
        self._is_complete = False
        own = previous.own_uses() if previous else {}
        # Those that stay in the memory of an earlier buffer, because another tensor aliases it.
        self._aliased: list[Tensor] = []
        self._states, self._master_weights = states, group["master_weights"]
        self._by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        self.rest: list[Tensor] = []
        for param in self._params:
            if can_flatten(param, own):
                self._by_kind[param.dtype, param.device].append(param)
            else:
                self.rest.append(param)
                if own and is_plain(param) and param.layout is torch.strided and storage_of(param) in own:
                    self._aliased.append(param)
        self.buffers: list[FlatBuffer] = []

    def own_uses(self) -> dict[int, int]:
        """Return ``FlatBuffer.own_uses`` of all buffers that parameters may be views of."""
        if self._previous:
            uses = dict(self._previous.own_uses())
        else:
            own = uses_of_one_tensor() - 1  # what torch counts besides tensors
            uses = {storage: count + own for storage, count in Counter(map(storage_of, self._aliased)).items()}
        for buffer in self.buffers:
            uses.update(buffer.own_uses())
        return uses

    def _can_flatten_more(self) -> bool:
        """Return whether the aliases of parameters are gone."""
        if not self._aliased:
            return False
        own = self.own_uses()
        return any(can_flatten(param, own) for param in self._aliased)

    def replace_params(self) -> None:
        """Move the parameters into buffers, one dtype at a time, so that their previous memory is freed.

        After a failure, a new group that has this one as ``previous`` recovers them.
        """
        for params in self._by_kind.values():
            self.buffers.append(FlatBuffer(params, dtype_of_states(params[0], self._master_weights), self._states))
            self.buffers[-1].replace_params()
        self._previous, self._is_complete = None, True

    def has_own_grads(self) -> bool:
        """Return whether all parameters are flattened and all gradients are views of their buffers."""
        return all([buffer.has_own_grads() for buffer in self.buffers]) and not self.rest  # each buffer notes it

    def is_current(self, group: dict[str, Any], states: MutableMapping[Tensor, Any], have_moved: bool) -> bool:
        """Return whether the group still has the same parameters, as views of its buffers; see ``FlatBuffer``."""
        params = group["params"]
        return (
            self._is_complete
            and group["master_weights"] == self._master_weights
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and all(buffer.is_current(states, have_moved) for buffer in self.buffers)
            and not self._can_flatten_more()
        )


def can_flatten(param: Tensor, own_uses: dict[int, int]) -> bool:
    """Return whether a parameter can be moved into a buffer.

    It cannot if it has no memory, belongs to FSDP1, which keeps views of it, or shares its storage with another tensor
    or process, which would no longer alias it.
    """
    if not is_plain(param) or is_in_fsdp1_unit(param) or param.numel() == 0 or param.layout != torch.strided:
        return False
    if not param.is_floating_point() or param.is_meta or not (param.requires_grad or param.grad is not None):
        return False
    if param.is_cpu and param.untyped_storage().is_shared():
        return False
    # No variable holds the storage, because torch 2.9 counts that as a use.
    is_alone = param.untyped_storage().nbytes() == param.nbytes and not has_alias(param)
    is_own = storage_uses(param) <= own_uses.get(storage_of(param), -1)
    return (is_alone or is_own) and is_dense(param)
