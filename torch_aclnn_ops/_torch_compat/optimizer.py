"""Private names of torch for optimizers: foreach kernels, version counters, hooks and gradient scalers."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_lerp_: Callable[..., Any] = torch._foreach_lerp_
foreach_neg: Callable[..., Any] = torch._foreach_neg
fused_adam_: Callable[..., Any] = torch._fused_adam_
fused_adamw_: Callable[..., Any] = torch._fused_adamw_

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the version counter of a tensor."""


def load_state_dict_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return an optimizer's ``load_state_dict`` pre-hooks and post-hooks."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    after = optimizer._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())


def per_optimizer_state(grad_scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state that a ``GradScaler`` keeps for an optimizer."""
    state: dict[str, Any] = grad_scaler._per_optimizer_states[id(optimizer)]
    return state
