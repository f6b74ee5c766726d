"""The optimizers of a trainer that average weights."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam


def unwrapped(optimizer: Any) -> Any:
    """Return an optimizer without the wrapper of accelerate or Lightning around it."""
    return getattr(optimizer, "optimizer", optimizer)


def averaging_optimizers(optimizers: Iterable[Any]) -> list[FusedEmaAdam]:
    """Return those that average weights, without wrappers."""
    return [optimizer for optimizer in map(unwrapped, optimizers) if isinstance(optimizer, FusedEmaAdam)]


@contextmanager
def averaged(optimizers: Iterable[FusedEmaAdam]) -> Iterator[None]:
    """Let the parameters of optimizers hold their averages inside a ``with`` block."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.swap_ema_params())
        yield
