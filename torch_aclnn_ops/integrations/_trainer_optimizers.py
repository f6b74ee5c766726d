"""A trainer's optimizers with averages of the weights."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam


def unwrapped(optimizer: Any) -> Any:
    """Unwrap an optimizer of Accelerate or Lightning."""
    return getattr(optimizer, "optimizer", optimizer)


def averaging_optimizers(optimizers: Iterable[Any]) -> list[FusedEmaAdam]:
    """Return the optimizers with averages, unwrapped."""
    return [optimizer for optimizer in map(unwrapped, optimizers) if isinstance(optimizer, FusedEmaAdam)]


@contextmanager
def averaged(optimizers: Iterable[FusedEmaAdam]) -> Iterator[None]:
    """Swap the parameters of optimizers with their averages for the duration of a ``with`` block."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.swap_ema_params())
        yield
