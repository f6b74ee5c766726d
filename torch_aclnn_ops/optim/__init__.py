"""``FusedEmaAdam``, conversion of its checkpoints, and access to it inside wrappers."""

from typing import TYPE_CHECKING

from torch_aclnn_ops._checks import describe, raise_for_missing_names
from torch_aclnn_ops.optim.checkpoints import to_mindspeed_state_dict
from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam

import torch

__all__ = ["FusedEmaAdam", "to_mindspeed_state_dict", "unwrap"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:
    __getattr__ = raise_for_missing_names(__name__, torch.optim)


def unwrap(optimizer: torch.optim.Optimizer) -> FusedEmaAdam:
    """Return the :class:`FusedEmaAdam` inside wrappers, to call its own methods, such as ``swap_ema_params()``.

    A wrapper has the wrapped optimizer as ``optimizer`` or ``optim``, for example the result of
    ``accelerator.prepare``. The optimizer in a :class:`torch.distributed.optim.ZeroRedundancyOptimizer` is not
    returned, because it has only the parameters and EMA weights of its rank.

    Args:
        optimizer: A wrapper, or the optimizer itself.

    Raises:
        RuntimeError: ``optimizer`` is a ``ZeroRedundancyOptimizer``.
        TypeError: There is no ``FusedEmaAdam`` inside.

    Example:
        >>> import torch
        >>> optimizer = FusedEmaAdam(torch.nn.Linear(2, 1).parameters())
        >>> unwrap(optimizer) is optimizer
        True
    """
    inner: object = optimizer
    while not isinstance(inner, FusedEmaAdam):
        if hasattr(inner, "consolidate_state_dict"):
            raise RuntimeError(
                f"unwrap: optimizer must have the EMA weights of all parameters, but the FusedEmaAdam in a"
                f" {type(inner).__name__} has those of its rank; after consolidate_state_dict(), its state_dict() has"
                " all of them as 'ema_params'"
            )
        inner = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if inner is None:
            raise TypeError(
                f"unwrap: optimizer must be a FusedEmaAdam or have one inside, but it is {describe(optimizer)}"
            )
    return inner
