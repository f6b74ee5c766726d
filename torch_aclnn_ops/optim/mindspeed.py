"""State dicts in the layout of MindSpeed's FusedEmaAdamW."""

from collections.abc import Mapping
from typing import Any

from torch_aclnn_ops._checks import describe

import torch


def to_mindspeed_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict of :class:`FusedEmaAdam` to the layout of MindSpeed's ``FusedEmaAdamW``.

    That layout has one int64 ``step`` per group, and the states ``exp_avg``, ``exp_avg_sq`` and ``ema_params``.
    ``FusedEmaAdam.load_state_dict`` accepts both layouts.

    Args:
        state_dict: The result of ``FusedEmaAdam.state_dict()``.

    Returns:
        A new dict that shares the tensors.

    Raises:
        TypeError: ``state_dict`` is not a dict.
        ValueError: The step counts of the parameters of a group differ, or EMA weights are missing.

    Example:
        >>> from torch_aclnn_ops.optim import FusedEmaAdam
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedEmaAdam([weight])
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> to_mindspeed_state_dict(optimizer.state_dict())["param_groups"][0]["step"]
        tensor(1)

    Source:
        MindSpeed, mindspeed/core/optimizer/fused_ema_adamw/fused_ema_adamw.py.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"to_mindspeed_state_dict: state_dict must be a dict, but it is {describe(state_dict)}")
    names = ("exp_avg", "exp_avg_sq", "ema_params")
    states, groups = dict(state_dict["state"]), []
    for i, group in enumerate(state_dict["param_groups"]):
        trained = [key for key in group["params"] if "step" in states.get(key, ())]
        steps = {int(states[key]["step"]) for key in trained}
        if len(steps) > 1:
            raise ValueError(
                f"to_mindspeed_state_dict: all parameters of a group must have the same step count, but those of group"
                f" {i} have {sorted(steps)}"
            )
        for key in trained:
            missing = [name for name in names if name not in states[key]]
            if missing:
                raise ValueError(
                    f"to_mindspeed_state_dict: the state of a parameter must have {', '.join(names)}, but that of"
                    f" {key!r} has no {' and no '.join(missing)}"
                )
            states[key] = {name: states[key][name] for name in names}
        groups.append({**group, "step": torch.tensor(steps.pop() if steps else 0, dtype=torch.int64)})
    return {**state_dict, "state": states, "param_groups": groups}
