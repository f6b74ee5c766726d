"""Private names of torch about optimizers: kernels for lists of tensors, counts of writes, hooks, gradient scalers."""

from collections.abc import Callable
from itertools import repeat
from operator import attrgetter
from typing import Any

from torch_aclnn_ops._torch_compat import attribute, lookup

from torch import Tensor


def _one_by_one(method: Callable[..., Tensor]) -> Callable[..., None]:
    def call(tensors: list[Tensor], *args: Any) -> None:
        for each in zip(tensors, *(arg if isinstance(arg, list) else repeat(arg) for arg in args), strict=False):
            method(*each)

    return call


# Without them parameters are updated one by one.
_LISTS = "a step for lists of parameters"
foreach_add_ = lookup("_foreach_add_", _LISTS, _one_by_one(Tensor.add_))
foreach_copy_ = lookup("_foreach_copy_", _LISTS, _one_by_one(Tensor.copy_))
foreach_lerp_ = lookup("_foreach_lerp_", _LISTS, _one_by_one(Tensor.lerp_))
fused_adam_ = lookup("_fused_adam_", _LISTS, None)
fused_adamw_ = lookup("_fused_adamw_", _LISTS, None)

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written to."""


def load_state_dict_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks that an optimizer calls before and after it loads a state dict."""
    names = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
    before, after = (attribute(optimizer, name, "load_state_dict()") for name in names)
    return list(before.values()), list(after.values())


def per_optimizer_state(grad_scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a ``GradScaler`` knows of an optimizer's step."""
    state: dict[str, Any] = attribute(grad_scaler, "_per_optimizer_states", "a GradScaler")[id(optimizer)]
    return state
