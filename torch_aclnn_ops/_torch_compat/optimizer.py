"""Private names of torch for optimizers: foreach kernels, version counters, hooks and gradient scalers."""

from collections.abc import Callable
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any

from torch_aclnn_ops._torch_compat import attribute, lookup

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def _foreach_loop(method: Callable[..., Tensor]) -> Callable[..., None]:
    def call(tensors: list[Tensor], *args: Any) -> None:
        for each in zip(tensors, *(arg if isinstance(arg, list) else repeat(arg) for arg in args), strict=False):
            method(*each)

    return call


# Without them parameters are updated in a loop.
_LISTS = "a step for lists of parameters"
foreach_add_ = lookup("_foreach_add_", _LISTS, _foreach_loop(Tensor.add_))
foreach_copy_ = lookup("_foreach_copy_", _LISTS, _foreach_loop(Tensor.copy_))
foreach_lerp_ = lookup("_foreach_lerp_", _LISTS, _foreach_loop(Tensor.lerp_))
foreach_neg = lookup("_foreach_neg", _LISTS, lambda tensors: list(map(Tensor.neg, tensors)))
fused_adam_ = lookup("_fused_adam_", _LISTS, None)
fused_adamw_ = lookup("_fused_adamw_", _LISTS, None)

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the version counter of a tensor."""


_uses_of: Callable[[int], int] = lookup(
    "_C._storage_Use_Count", "flatten=True, if other tensors share the memory of parameters,", lambda _: 0
)


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors have the storage of this one, itself included; torch may count a constant more."""
    return _uses_of(StorageWeakRef(tensor.untyped_storage()).cdata)


@cache
def uses_of_one_tensor() -> int:
    """Return ``storage_uses`` of a tensor that has a storage for itself."""
    return storage_uses(torch.empty(0, device="cpu"))


def has_alias(tensor: Tensor) -> bool:
    """Return whether others use the storage: another tensor, such as ``tensor.detach()``, a NumPy array or a file."""
    # No variable holds the storage, because torch 2.9 counts that as a use.
    return not tensor.untyped_storage().resizable() or storage_uses(tensor) > uses_of_one_tensor()


def load_state_dict_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return an optimizer's ``load_state_dict`` pre-hooks and post-hooks."""
    names = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
    before, after = (attribute(optimizer, name, "load_state_dict()") for name in names)
    return list(before.values()), list(after.values())


def per_optimizer_state(grad_scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state that a ``GradScaler`` keeps for an optimizer."""
    state: dict[str, Any] = attribute(grad_scaler, "_per_optimizer_states", "a GradScaler")[id(optimizer)]
    return state
