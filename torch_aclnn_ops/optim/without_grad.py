"""EMA weights of parameters without a gradient, which continue to be updated in each step."""

from typing import NamedTuple

from torch_aclnn_ops._torch_compat.optimizer import foreach_lerp_
from torch_aclnn_ops.ops.ema_adam.lists import Options, local
from torch_aclnn_ops.optim.options import EmaSchedule

import torch
from torch import Tensor


class ParamsWithoutGrad(NamedTuple):
    """The parameters of a group that have a state but no gradient in this step, as lists.

    ``weights`` are their master weights, if they have any.
    """

    weights: list[Tensor]
    ema_params: list[Tensor]
    steps: list[Tensor]


def update_ema_params(params: ParamsWithoutGrad, steps: list[Tensor], options: Options, schedule: EmaSchedule) -> None:
    """Update the EMA weights of these parameters.

    Their step counts do not advance, so the schedule uses the largest step count of all parameters of the optimizer:
    ``steps`` are the counts of all of them after this step.
    """
    weight = 1 - _decay(steps, params.steps[0].device, schedule)
    found_inf = options.found_inf
    if found_inf is not None and (torch.compiler.is_compiling() or not found_inf.is_cpu):
        applies = found_inf.reshape(()) == 0
        weight = (applies.to(weight.device) if isinstance(weight, Tensor) else applies) * weight
    weights, ema_params = ([local(tensor) for tensor in tensors] for tensors in params[:2])
    if isinstance(weight, Tensor):
        for old, new in zip(ema_params, weights, strict=True):
            old.lerp_(new, weight.to(old.device, old.dtype))
    elif weight != 0:
        for device in {old.device for old in ema_params}:
            pairs = [(old, new) for old, new in zip(ema_params, weights, strict=True) if old.device == device]
            foreach_lerp_(*map(list, zip(*pairs, strict=True)), weight)


def _decay(steps: list[Tensor], device: torch.device, schedule: EmaSchedule) -> float | Tensor:
    if schedule.is_constant:
        return schedule.ema_decay
    if not torch.compiler.is_compiling() and all(step.is_cpu for step in steps):
        return schedule.decay_at(max(int(step.max()) for step in steps))
    return schedule.decays_at(torch.stack([step.max().to(device) for step in steps]).max())
