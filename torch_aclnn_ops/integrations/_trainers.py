"""What callbacks of transformers' ``Trainer`` and of Lightning share: EMA weights, and reports of steps."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch_aclnn_ops._call_log import Report
from torch_aclnn_ops.optim import FusedEmaAdam
from torch_aclnn_ops.optim.swap import restore_dtype

import torch

_logger = logging.getLogger("torch_aclnn_ops")
_LARGE_SHARE = 0.1


def unwrapped(optimizer: Any) -> Any:
    """Unwrap an optimizer of Accelerate or Lightning."""
    return getattr(optimizer, "optimizer", optimizer)


def ema_optimizers(optimizers: Iterable[Any]) -> list[FusedEmaAdam]:
    """Return the optimizers with EMA weights, unwrapped."""
    return [optimizer for optimizer in map(unwrapped, optimizers) if isinstance(optimizer, FusedEmaAdam)]


def warn_of_initial_weights(optimizers: Iterable[FusedEmaAdam], steps: int) -> None:
    """Warn if the EMA weights of so many steps are still close to the initial weights."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # Each update multiplies the share of the initial weights by the decay.
            share = group["ema_decay"] ** (steps // group["ema_update_every"])
            if share > _LARGE_SHARE and group["ema_warmup"] is None and group["ema_start_step"] == 0:
                warnings.warn(
                    f"EmaCallback: after {steps} steps with ema_decay={group['ema_decay']} the EMA weights are"
                    f' still {share:.1%} initial weights; pass a smaller ema_decay or ema_warmup="ratio" to the'
                    " optimizer",
                    stacklevel=2,
                )
                return


@contextmanager
def swapped(optimizers: Sequence[FusedEmaAdam], model: torch.nn.Module | None = None) -> Iterator[None]:
    """Swap the parameters of optimizers with their EMA weights for the duration of a ``with`` block.

    The swap restores the dtype of the optimizers' parameters if the block converts the model, as ``bf16_full_eval``
    does; that of the other parameters of ``model`` is restored here.
    """
    params = set() if model is None or not optimizers else set(model.parameters())
    for optimizer in optimizers:
        params.difference_update(param for group in optimizer.param_groups for param in group["params"])
    with ExitStack() as stack:
        for param in params:
            stack.callback(restore_dtype, param, param.detach())
        for optimizer in optimizers:
            stack.enter_context(optimizer.swap_ema_params(model))
        yield


class StepReport:
    """Base class of trainer callbacks that count the calls of the first training steps, and log the table."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"ReportCallback: steps must be an int of at least 1, but it is {steps!r}")
        self.report = Report()
        self._steps, self._left, self._is_open = steps, 0, False

    def _begin_report(self) -> None:
        """Start counting."""
        self._end_report()
        self.report = Report()
        self._left, self._is_open = self._steps, True
        self.report.__enter__()

    def _end_step(self) -> None:
        """Count down a step, and end the report after the last one."""
        self._left -= 1
        if self._left == 0:
            self._end_report()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the report, if training had fewer steps."""
        self._end_report()

    def _end_report(self) -> None:
        """Stop counting, and log the table; a no-op if not counting."""
        if self._is_open:
            self._is_open = False
            self.report.__exit__()
            _logger.info("%d training steps:\n%s", self._steps - self._left, self.report)
