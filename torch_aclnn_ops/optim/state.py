"""The state of a parameter: its tensors, their dtypes, initialization and caching."""

import itertools
import reprlib
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from operator import is_
from typing import Any

from torch_aclnn_ops._tensors import HALF_DTYPES, is_plain, local
from torch_aclnn_ops._torch_compat.private import version_of

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

# The names of the first two are PyTorch's; "ema_params" is also used by MindSpeed and torchtitan.
TENSOR_STATES = ("exp_avg", "exp_avg_sq", "ema_params", "master_params")


def has_state(states: MutableMapping[Tensor, Any], param: Tensor) -> bool:
    """Return whether a parameter has been updated before, possibly before a checkpoint."""
    return "step" in states.get(param, ())


def states_of_params(states: MutableMapping[Any, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return the parameters that have a state, with their states; entries with other keys are ignored."""
    return [(key, state) for key, state in states.items() if isinstance(key, Tensor)]


def dtype_of_states(param: Tensor, master_weights: bool) -> torch.dtype:
    """Return the common dtype of all states of a parameter, as the operator requires."""
    return torch.float32 if master_weights and param.dtype in HALF_DTYPES else param.dtype


def check_shape(what: str, value: Tensor, param: Tensor, name: str) -> None:
    """Raise if a gradient or a state does not have the shape of its parameter, or this rank's shard of it."""
    for found, needed in (value.shape, param.shape), (local(value).shape, local(param).shape):
        if found != needed:
            raise RuntimeError(
                f"FusedEmaAdam: {what} must have the shape {list(needed)} of {name}, but it has {list(found)}; after a"
                " change of shape create a new optimizer, or delete the gradient and `del optimizer.state[param]`"
            )


def normalize_state(state: dict[str, Any], param: Tensor, dtype: torch.dtype, copies_step: bool) -> dict[str, Any]:
    """Convert a loaded state to the dtypes and device that a step needs."""
    converted = dict(state)
    if "step" in state:
        # The operator reads an int64 on the parameter's device, which avoids synchronization. A copy, because in a
        # checkpoint several parameters may share one step.
        step = state["step"]
        step = step.detach() if isinstance(step, Tensor) else torch.tensor(step, device="cpu")
        converted["step"] = step.reshape(()).to(param.device, torch.int64, copy=copies_step)
    for name in TENSOR_STATES:
        value = state.get(name)
        if isinstance(value, Tensor):
            check_shape(name, value, param, "its parameter")
            converted[name] = value.to(param.device, dtype)
    return converted


def init_missing_state(state: dict[str, Any], param: Tensor, dtype: torch.dtype) -> None:
    """Initialize missing entries of a state."""
    # A new dict, so that the state is unchanged after an exception.
    new = normalize_state(state, param, dtype, copies_step=False)
    if "step" not in new:
        new["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in new:
            new[name] = torch.zeros_like(param, dtype=dtype)
    if dtype != param.dtype and "master_params" not in new:
        new["master_params"] = param.detach().to(dtype)
    if "ema_params" not in new:
        weights = param.detach() if dtype == param.dtype else new["master_params"]
        new["ema_params"] = weights.clone()
    state.update(new)
    if dtype == param.dtype:
        state.pop("master_params", None)


def describe_params(optimizer: Optimizer, params: Iterable[Tensor]) -> str:
    """Describe parameters by their indices in the optimizer's groups, such as ``[0, 1, 3] of group 0``."""
    ids = set(map(id, params))
    by_group = [[j for j, one in enumerate(group["params"]) if id(one) in ids] for group in optimizer.param_groups]
    return " and ".join(f"{reprlib.repr(found)} of group {i}" for i, found in enumerate(by_group) if found)


def warn_of_missing_ema_params(optimizer: Optimizer) -> None:
    """Warn if a loaded state has no EMA weights for some of the trained parameters."""
    lacking = [
        param for param, state in states_of_params(optimizer.state) if "exp_avg" in state and "ema_params" not in state
    ]
    if lacking:
        warnings.warn(
            f"FusedEmaAdam.load_state_dict: the state dict has no 'ema_params' for parameters"
            f" {describe_params(optimizer, lacking)}, or those from before torch.optim.AdamW trained them; their EMA"
            " starts from the weights",
            stacklevel=4,
        )


def sync_master_from_param(master: Tensor, param: Tensor) -> None:
    """Copy elements of a parameter that were modified outside of the optimizer to its master weight."""
    param = param.to(master.device)  # trainers may move states to the host after training
    rounded = master.to(param.dtype)
    # Inductor omits the rounding before a comparison of floating-point numbers, but not before one of their bits.
    are_bits_compared = torch.compiler.is_compiling()
    is_unchanged = rounded.view(torch.int16) == param.view(torch.int16) if are_bits_compared else rounded == param
    master.copy_(torch.where(is_unchanged, master, param.to(master.dtype)))


def sync_masters_from_params(masters: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Call :func:`sync_master_from_param` for the parameters that have a master weight."""
    for master, param in zip(masters, params, strict=True):
        if master.dtype != param.dtype:
            sync_master_from_param(local(master), local(param))


def _join_steps(states: list[dict[str, Any]]) -> None:
    """Move the step counts on an NPU into one tensor, so that one launch increments all of them."""
    by_device = defaultdict(list)
    for state in states:
        if state["step"].device.type == "npu":
            by_device[state["step"].device].append(state)
    for found in by_device.values():
        steps = [state["step"] for state in found]
        places = [(step.untyped_storage().data_ptr(), step.storage_offset()) for step in steps]
        first, offset = places[0]
        if places != [(first, offset + i) for i in range(len(steps))]:
            joined = torch.stack(steps)
            for i, state in enumerate(found):
                state["step"] = joined[i]


class Versions:
    """Version counters of parameters with master weights; other data of a parameter is found by its address."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self._recorded: list[int] = []

    def are_modified(self) -> bool:
        """Return whether parameters were modified after :meth:`record`, or none were recorded."""
        return self._recorded != self._current()

    def record(self) -> None:
        """Record the versions, after the optimizer has written to the parameters."""
        self._recorded = self._current()

    def _current(self) -> list[int]:
        """Return the version counters of the parameters, and of DTensors' shards, which have their own."""
        shards = [local(param) for param in self.params if not is_plain(param)]
        return [*map(version_of, self.params), *map(version_of, shards)]


class CachedState:
    """The states of parameters as lists, cached between steps. Step counts on an NPU are joined."""

    def __init__(self, params: Sequence[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        self.params = [param for param in params if has_state(states, param)]
        found = [states[param] for param in self.params]
        _join_steps(found)
        self.masters = [state.get("master_params", param) for param, state in zip(self.params, found, strict=True)]
        self.versions = Versions([] if all(map(is_, self.masters, self.params)) else self.params)
        self.lists = [[state[name] for state in found] for name in ("exp_avg", "exp_avg_sq", "ema_params", "step")]
        self.counts = StepCounts(self.lists[3])


class StepCounts:
    """Step counts of parameters as known on the host without synchronization: equal values mean equal counts.

    While ``are_exact``, the values are the counts themselves. They are not once a device may have skipped a step, a
    graph may have repeated one, or something else has written to the counts on a device. A tensor may have several.
    """

    _new_values = itertools.count(2**63)  # no step count is as large

    def __init__(self, steps: Sequence[Tensor]) -> None:
        self.values: list[int] = []
        self.are_exact = len({step.device for step in steps}) == 1
        self._steps = steps
        self._versions: list[int] = []  # of the steps that the values belong to; empty to read them again

    def read(self) -> None:
        """Read the counts; on a device only if they were modified since :meth:`record`."""
        is_on_device = not self._steps[0].is_cpu
        versions = list(map(version_of, self._steps)) if is_on_device else []
        if is_on_device and versions == self._versions:
            return
        self.values = torch.cat([step.reshape(-1) for step in self._steps]).tolist()
        self.are_exact &= not (is_on_device and self._versions)
        self._versions = versions

    def forget(self) -> None:
        """Read the counts again before the next step, because the optimizer writes them."""
        self._versions = []

    def record(self, stepped: Collection[int]) -> None:
        """Record a completed step of these parameters on a device; on a CPU each step reads the counts."""
        if self.are_exact:
            for i in stepped:
                self.values[i] += 1
        elif len(stepped) < len(self.values):
            # A skipped step must not seem to make counts equal, if only some of the parameters have a gradient.
            new: defaultdict[int, int] = defaultdict(self._new_values.__next__)
            for i in stepped:
                self.values[i] = new[self.values[i]]
        self._versions = list(map(version_of, self._steps))
