"""The state of one parameter: which tensors it has, of which dtype, and where they come from."""

from collections.abc import Iterable, MutableMapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

from torch_aclnn_ops._torch_compat.optimizer import version_of
from torch_aclnn_ops.ops.ema_adam.step_progress import format_ranges

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

# The names are torch's, where torch has the tensor; "ema_params" is also the name of MindSpeed and torchtitan.
AVERAGES = ("exp_avg", "exp_avg_sq", "ema_params", "master_params")
_16_BIT = (torch.float16, torch.bfloat16)


def has_state(states: MutableMapping[Tensor, Any], param: Tensor) -> bool:
    """Return whether a parameter was updated before, here or in the run of a checkpoint."""
    return "step" in states.get(param, ())


def states_of_params(states: MutableMapping[Any, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return the parameters that have a state, with it; other entries belong to whoever has made them."""
    return [(key, state) for key, state in states.items() if isinstance(key, Tensor)]


def dtype_of_states(param: Tensor, master_weights: bool) -> torch.dtype:
    """Return the dtype of all states of a parameter: the operator takes one for all its tensors."""
    return torch.float32 if master_weights and param.dtype in _16_BIT else param.dtype


def normalised(state: dict[str, Any], param: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return a state, from whichever checkpoint, with the kinds of tensors that a step needs, on its device."""
    made = dict(state)
    if "step" in state:
        # An int64 on the parameter's device is what the operator reads: kept there, nothing has to wait for it.
        # A copy, as a checkpoint may have one step for several parameters.
        step = state["step"]
        step = step.detach() if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
        made["step"] = step.reshape(()).to(param.device, torch.int64, copy=True)
    for name in AVERAGES:
        value = state.get(name)
        if isinstance(value, Tensor):
            if value.shape != param.shape:
                raise ValueError(
                    f"FusedEmaAdam: {name} must have the shape of its parameter {list(param.shape)},"
                    f" but its shape is {list(value.shape)}"
                )
            made[name] = value.to(param.device, dtype)
    return made


def complete(state: dict[str, Any], param: Tensor, dtype: torch.dtype) -> bool:
    """Make what a state lacks; return whether the average of a parameter that was trained already was missing."""
    # Made aside, so that an exception leaves the state as it was.
    made = normalised(state, param, dtype)
    if "step" not in made:
        made["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in made:
            made[name] = torch.zeros_like(param, dtype=dtype)
    if dtype != param.dtype and "master_params" not in made:
        made["master_params"] = param.detach().to(dtype)
    lacks_average = "ema_params" not in made and "exp_avg" in state
    if "ema_params" not in made:
        weights = param.detach() if dtype == param.dtype else made["master_params"]
        made["ema_params"] = weights.clone()
    state.update(made)
    if dtype == param.dtype:
        state.pop("master_params", None)
    return lacks_average


def describe_params(optimizer: Optimizer, params: Iterable[Tensor]) -> str:
    """Name parameters by their places in the groups of an optimizer, such as ``0-3 of group 0``."""
    ids = set(map(id, params))
    of_groups = (
        (i, format_ranges(j for j, param in enumerate(group["params"]) if id(param) in ids))
        for i, group in enumerate(optimizer.param_groups)
    )
    return " and ".join(f"{members} of group {i}" for i, members in of_groups if members)


def sync_master_from_param(master: Tensor, param: Tensor) -> None:
    """Write to a master weight what somebody else has written to its parameter; the rest keeps its digits."""
    master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))


class CachedState:
    """The states of parameters as lists, and whether the lists are still right.

    Args:
        params: the parameters. Those that were never updated have no state.
        states: the optimizer's states, which :func:`complete` has seen.
    """

    def __init__(self, params: Sequence[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        self._all_params, self._states = list(params), states
        self.params = [param for param in params if has_state(states, param)]
        self._others = [param for param in params if not has_state(states, param)]
        found = [states[param] for param in self.params]
        self.masters = [state.get("master_params", param) for param, state in zip(self.params, found, strict=True)]
        self.has_masters = not all(map(is_, self.masters, self.params))
        self._names = ["exp_avg", "exp_avg_sq", "ema_params", "step"]
        self.lists = [[state[name] for state in found] for name in self._names]
        if self.has_masters:
            self._names.append("master_params")
        self._found = self._look()
        self._versions: list[int] = []

    def _look(self) -> list[object]:
        """Look at what must stay as it is: the states, and the tensors in them."""
        states = list(map(self._states.get, self._all_params))
        dicts = [state for state in states if state is not None]
        found: list[object] = states[:]
        for name in self._names:
            found += map(dict.get, dicts, repeat(name))
        return found

    def is_current(self, params: Sequence[Tensor], states: MutableMapping[Tensor, Any]) -> bool:
        """Return whether these are the parameters, and nobody has replaced a tensor of a state."""
        if states is not self._states or len(params) != len(self._all_params):
            return False
        if not all(map(is_, params, self._all_params)):
            return False
        found = self._look()
        return len(found) == len(self._found) and all(map(is_, found, self._found))

    def new_params(self) -> list[Tensor]:
        """Return the parameters that have their first gradient, and no state yet."""
        return [param for param in self._others if param.grad is not None]

    def were_params_written(self) -> bool:
        """Return whether somebody has written to parameters that have masters, after ``remember_own_writes``."""
        return self.has_masters and self._versions != list(map(version_of, self.params))

    def remember_own_writes(self) -> None:
        """Take what is in the parameters for what the optimizer has written."""
        if self.has_masters:
            self._versions = list(map(version_of, self.params))
