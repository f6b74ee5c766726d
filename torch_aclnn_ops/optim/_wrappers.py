"""The optimizer inside of what others wrap around it."""

from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam

from torch.optim.optimizer import Optimizer


def unwrap(optimizer: Optimizer) -> FusedEmaAdam:
    """Return the :class:`FusedEmaAdam` inside of wrappers, for its own methods, such as ``swap_ema_params()``.

    A wrapper is an optimizer that has another one in ``optimizer`` or ``optim``, as what ``accelerator.prepare``
    returns, and :class:`torch.distributed.optim.ZeroRedundancyOptimizer`, in which each rank's ``FusedEmaAdam`` has a
    part of the parameters, and raises an error where its averages are asked for.

    Args:
        optimizer: a wrapper, or the optimizer itself.

    Raises:
        TypeError: there is no ``FusedEmaAdam`` inside.

    Example:
        >>> import torch
        >>> optimizer = FusedEmaAdam(torch.nn.Linear(2, 1).parameters())
        >>> unwrap(optimizer) is optimizer
        True
    """
    inner: object = optimizer
    while not isinstance(inner, FusedEmaAdam):
        inner = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if inner is None:
            raise TypeError(f"unwrap: optimizer must be a FusedEmaAdam or have one inside, but it is {optimizer!r}")
    return inner
