"""State dicts of this optimizer, of torch's Adam and AdamW, and of MindSpeed's FusedEmaAdamW."""

from collections.abc import Mapping
from typing import Any

from torch_aclnn_ops.optim._states import normalise

import torch
from torch import Tensor


class _Hidden:
    """Hides a tensor from ``Optimizer.load_state_dict``, which would round it to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def with_torchs_steps(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose steps are float32, as torch's optimizers need them."""
    states = {
        key: {**state, "step": state["step"].to(torch.float32)} if "step" in state else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def prepare(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict, of whichever optimizer, in the form that ``Optimizer.load_state_dict`` leaves alone."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    states = {key: dict(state) for key, state in state_dict["state"].items() if state is not None}
    for i, group in enumerate(groups):
        if group.get("amsgrad"):
            raise ValueError(
                f"FusedEmaAdam: the state to load has amsgrad=True in group {i}, which this optimizer does not have"
            )
        group_step = group.pop("step", None)  # MindSpeed's, whose states have none
        if group_step is not None:
            for key in group["params"]:
                if key in states:
                    states[key].setdefault("step", group_step)
    for state in states.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = _Hidden(value)
    return {**state_dict, "state": states, "param_groups": groups}


def unpacked(state: Mapping[str, Any], param: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return a loaded state with its tensors on the parameter's device, in the dtype of states."""
    contents = {name: value.tensor if isinstance(value, _Hidden) else value for name, value in state.items()}
    normalise(contents, param, dtype)
    return contents


def to_mindspeed_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of :class:`FusedEmaAdam` in the layout of MindSpeed's ``FusedEmaAdamW``.

    Its ``step`` is one of each group, int64, and its states are ``exp_avg``, ``exp_avg_sq`` and ``ema_params``.
    ``FusedEmaAdam.load_state_dict`` takes both layouts.

    Args:
        state_dict: what ``FusedEmaAdam.state_dict()`` returned.

    Returns:
        Another dict with the same tensors.

    Raises:
        ValueError: the parameters of a group have done different numbers of steps.

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
    groups = []
    for i, group in enumerate(state_dict["param_groups"]):
        states = [state_dict["state"][key] for key in group["params"] if key in state_dict["state"]]
        steps = {int(state["step"]) for state in states}
        if len(steps) > 1:
            raise ValueError(
                f"to_mindspeed_state_dict: all parameters of a group must have done as many steps, but those of group"
                f" {i} have done {sorted(steps)}"
            )
        groups.append({**group, "step": torch.tensor(steps.pop() if steps else 0, dtype=torch.int64)})
    names = ("exp_avg", "exp_avg_sq", "ema_params")
    return {
        **state_dict,
        "state": {key: {name: state[name] for name in names} for key, state in state_dict["state"].items()},
        "param_groups": groups,
    }
