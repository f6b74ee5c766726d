"""The state of one parameter: which tensors it has, of which dtype, and where they come from."""

import warnings
from typing import Any

import torch
from torch import Tensor

# The names are torch's, where torch has the tensor; "ema_params" is also the name of MindSpeed and torchtitan.
AVERAGES = ("exp_avg", "exp_avg_sq", "ema_params", "master_params")
_16_BIT = (torch.float16, torch.bfloat16)


def dtype_of_states(param: Tensor, master_weights: bool) -> torch.dtype:
    """Return the dtype of all states of a parameter: the operator takes one for all its tensors."""
    return torch.float32 if master_weights and param.dtype in _16_BIT else param.dtype


def normalise(state: dict[str, Any], param: Tensor, dtype: torch.dtype) -> None:
    """Bring what a state has, from whichever checkpoint, to the kinds and the device that a step needs."""
    if "step" in state:
        # An int64 on the parameter's device is what the operator reads: kept there, nothing has to wait for it.
        # A copy, as a checkpoint may have one step for several parameters.
        step = state["step"]
        step = step.detach() if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
        state["step"] = step.reshape(()).to(param.device, torch.int64, copy=True)
    for name in AVERAGES:
        value = state.get(name)
        if isinstance(value, Tensor):
            if value.shape != param.shape:
                raise ValueError(
                    f"FusedEmaAdam: {name} must have the shape of its parameter {list(param.shape)},"
                    f" but its shape is {list(value.shape)}"
                )
            state[name] = value.to(param.device, dtype)


def complete(state: dict[str, Any], param: Tensor, dtype: torch.dtype) -> bool:
    """Make what a state lacks; return whether the average of a parameter that was trained already was missing."""
    was_trained = "exp_avg" in state
    normalise(state, param, dtype)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtype)
    if dtype == param.dtype:
        state.pop("master_params", None)
    elif "master_params" not in state:
        state["master_params"] = param.detach().to(dtype)
    lacks_average = "ema_params" not in state
    if lacks_average:
        state["ema_params"] = state.get("master_params", param.detach()).clone()
    return was_trained and lacks_average


def take_over_writes(master: Tensor, param: Tensor) -> None:
    """Let a master weight follow its parameter where somebody else has written to the parameter."""
    master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))


def warn_of_missing_average() -> None:
    """Say that averages start anew."""
    warnings.warn(
        "FusedEmaAdam: the loaded state has no 'ema_params' for parameters that were trained before, as a checkpoint of"
        " torch.optim.AdamW; their averages start from the weights",
        stacklevel=7,
    )


class FittedState:
    """The states of a parameter that were looked at once, and need no look as long as they are the same objects."""

    __slots__ = ("_data", "_state", "exp_avg", "exp_avg_sq", "ema_param", "master", "step", "version")

    def __init__(self, param: Tensor, state: dict[str, Any]) -> None:
        self._state = state
        self._data = param.dtype, param.device
        self.step = state["step"]
        self.exp_avg = state["exp_avg"]
        self.exp_avg_sq = state["exp_avg_sq"]
        self.ema_param = state["ema_params"]
        self.master = state.get("master_params", param)
        self.version = -1  # of the parameter, after the last write of the optimizer

    def is_current(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Return whether nobody has replaced a tensor, or changed the parameter's dtype or device."""
        return (
            state is self._state
            and state.get("step") is self.step
            and state.get("exp_avg") is self.exp_avg
            and state.get("exp_avg_sq") is self.exp_avg_sq
            and state.get("ema_params") is self.ema_param
            and state.get("master_params", param) is self.master
            and (param.dtype, param.device) == self._data
        )
