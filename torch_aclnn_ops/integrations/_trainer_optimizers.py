"""A trainer's optimizers with averages of the weights."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam

_LARGE_SHARE = 0.1


def unwrapped(optimizer: Any) -> Any:
    """Unwrap an optimizer of Accelerate or Lightning."""
    return getattr(optimizer, "optimizer", optimizer)


def averaging_optimizers(optimizers: Iterable[Any]) -> list[FusedEmaAdam]:
    """Return the optimizers with averages, unwrapped."""
    return [optimizer for optimizer in map(unwrapped, optimizers) if isinstance(optimizer, FusedEmaAdam)]


def warn_of_initial_weights(optimizers: Iterable[FusedEmaAdam], steps: int) -> None:
    """Warn if the averages of so many steps are still close to the initial weights."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # Each update multiplies the share of the initial weights by the decay.
            share = group["ema_decay"] ** (steps // group["ema_update_every"])
            if share > _LARGE_SHARE and group["ema_warmup"] is None and group["ema_start_step"] == 0:
                warnings.warn(
                    f"EmaCallback: after {steps} steps with ema_decay={group['ema_decay']} the averages still have"
                    f' {share:.1%} initial weights; give FusedEmaAdam a smaller ema_decay, or ema_warmup="ratio"',
                    stacklevel=2,
                )
                return


@contextmanager
def averaged(optimizers: Iterable[FusedEmaAdam]) -> Iterator[None]:
    """Swap the parameters of optimizers with their averages for the duration of a ``with`` block."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.swap_ema_params())
        yield
