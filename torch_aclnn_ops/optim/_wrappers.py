"""Access to the optimizer inside wrappers of other libraries."""

from torch_aclnn_ops._checks import describe
from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam

from torch.optim.optimizer import Optimizer


def unwrap(optimizer: Optimizer) -> FusedEmaAdam:
    """Return the :class:`FusedEmaAdam` inside wrappers, to call its own methods, such as ``swap_ema_params()``.

    A wrapper has the wrapped optimizer as ``optimizer`` or ``optim``, for example the result of
    ``accelerator.prepare``. In a :class:`torch.distributed.optim.ZeroRedundancyOptimizer` each rank's ``FusedEmaAdam``
    has only some of the parameters, and its averaging methods raise.

    Args:
        optimizer: A wrapper, or the optimizer itself.

    Raises:
        TypeError: There is no ``FusedEmaAdam`` inside.

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
            raise TypeError(
                f"unwrap: optimizer must be a FusedEmaAdam or have one inside, but it is {describe(optimizer)}"
            )
    return inner
