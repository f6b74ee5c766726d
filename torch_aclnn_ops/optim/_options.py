"""The options of a parameter group: those of a step, and those of the average's schedule."""

from typing import Any

from torch_aclnn_ops.functional._ema_adam_implementations import Options
from torch_aclnn_ops.functional.ema_adam import check_options
from torch_aclnn_ops.optim._schedule import EmaSchedule

from torch import Tensor


def options_of(group: dict[str, Any]) -> tuple[Options, EmaSchedule]:
    """Take the options from a parameter group; raise where one is of another type or out of range."""
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"FusedEmaAdam: betas must be a pair of numbers, but it is {betas!r}")
    names = ("lr", "ema_decay", "eps", "weight_decay", "decoupled_weight_decay", "bias_correction", "maximize")
    options = Options(beta1=betas[0], beta2=betas[1], **{name: group[name] for name in names})
    check_options(options)
    if isinstance(options.ema_decay, Tensor):
        raise TypeError(f"FusedEmaAdam: ema_decay must be a number, but it is {options.ema_decay!r}")
    if not isinstance(group["master_weights"], bool):
        raise TypeError(f"FusedEmaAdam: master_weights must be True or False, but it is {group['master_weights']!r}")
    return options, EmaSchedule.of(group)
