"""Averages of a module's buffers, such as the statistics of batch norm."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._tensors import DTYPES, is_plain, overlaps_itself
from torch_aclnn_ops.ops.ema_adam import Options, TensorLists
from torch_aclnn_ops.optim.options import EmaSchedule
from torch_aclnn_ops.optim.state import dtype_of_states
from torch_aclnn_ops.optim.step import update_ema_params

import torch
from torch import Tensor, nn

_LOAD = "FusedEmaAdam.load_state_dict"

# By name, a buffer in the dtype of its average, and the average, before it is updated.
PreparedBuffers = dict[str, tuple[Tensor, Tensor]]


class EmaBuffers:
    """The averages of a module's floating-point buffers by their names; none before the first step.

    Buffers are looked up by name in each call, because ``module.to()`` replaces them. Without a module there are none.
    """

    def __init__(self, module: nn.Module | None) -> None:
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(
                f"FusedEmaAdam: ema_buffers must be a torch.nn.Module or None, but it is {describe(module)}"
            )
        self.module, self.averages = module, dict[str, Tensor]()

    def prepare(self, schedules: list[EmaSchedule]) -> PreparedBuffers:
        """Check and allocate all that a step needs; nothing changes before :attr:`averages` is assigned."""
        if self.module is not None and any(schedule != schedules[0] for schedule in schedules):
            raise ValueError(
                "FusedEmaAdam.step: with ema_buffers all parameter groups must have the same options of the EMA, but"
                f" they have {schedules}"
            )
        prepared: PreparedBuffers = {}
        for name, buffer in self._averaged().items():
            dtype, known = dtype_of_states(buffer, True), self.averages.get(name)
            # With the device, because torch_npu 2.9 does not copy in to(dtype, copy=True).
            average = (buffer.detach() if known is None else known).to(buffer.device, dtype, copy=known is None)
            prepared[name] = buffer.detach().to(dtype), average
        return prepared

    def are_new(self, prepared: PreparedBuffers) -> bool:
        """Return whether prepared averages are other tensors than those of the last step."""
        return any(average is not self.averages.get(name) for name, (_, average) in prepared.items())

    def update(self, prepared: PreparedBuffers, steps: list[Tensor], options: Options, schedule: EmaSchedule) -> None:
        """Update the averages as those of parameters without a gradient; ``steps`` are the counts of all parameters."""
        self.averages = {name: average for name, (_, average) in prepared.items()}
        if prepared:
            buffers = [buffer for buffer, _ in prepared.values()]
            lists = TensorLists(buffers, [], [], [], [*self.averages.values()], steps, [])
            update_ema_params(lists, steps, options, schedule)

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the averages in the form of a parameter's state."""
        buffers = self._averaged()
        return {buffers[name]: {"ema_params": average} for name, average in self.averages.items()}

    def reset(self) -> None:
        """Reset the averages to the buffers."""
        for buffer, state in self.states().items():
            state["ema_params"].copy_(buffer)

    def copies(self) -> list["CopiedBuffer"]:
        """Return copies of all buffers for a swap, one for each module that has them."""
        states = self.states() if self.averages else {}
        return [
            CopiedBuffer(owner, name, buffer, buffer.detach().clone(), states.get(buffer, {}).get("ema_params"))
            for owner in (() if self.module is None else self.module.modules())
            for name, buffer in owner.named_buffers(recurse=False)
            if _is_writable(buffer)
        ]

    def loaded(self, saved: Any) -> "EmaBuffers":
        """Return these buffers with the averages of a state dict, or without any if it has none."""
        result, buffers = EmaBuffers(self.module), self._averaged()
        needed, found = _shapes(buffers), _shapes(saved)
        if found not in ({}, needed):
            raise ValueError(f"{_LOAD}: ema_buffers must be like those of the optimizer, {needed}, but it is {found}")
        for name, value in saved.items():
            dtype = dtype_of_states(buffers[name], True)
            result.averages[name] = value.detach().to(buffers[name].device, dtype, copy=True)
        return result

    def warn_of_missing(self, states: Mapping[Any, Any]) -> None:
        """Warn if there are loaded states of parameters, but no averages."""
        if not self.averages and self._averaged() and any("exp_avg" in state for state in states.values()):
            warnings.warn(
                f"{_LOAD}: the state dict has no 'ema_buffers'; the averages of the buffers start from the buffers",
                stacklevel=4,
            )

    def _averaged(self) -> dict[str, Tensor]:
        """Return the floating-point buffers, a shared one once."""
        named = () if self.module is None else self.module.named_buffers()
        found = {name: buffer for name, buffer in named if buffer.dtype in DTYPES}
        for name, buffer in found.items():
            shape = self.averages.get(name, buffer).shape
            if not _is_writable(buffer) or buffer.shape != shape:
                raise RuntimeError(
                    f"FusedEmaAdam: buffer {name!r} of ema_buffers must be a plain dense tensor of the shape of its"
                    f" average, {list(shape)}, but it is a {buffer.layout} {type(buffer).__name__} of"
                    f" {list(buffer.shape)}; expanded buffers cannot be averaged"
                )
        return found


def _shapes(tensors: Any) -> Any:
    """Return the shapes of tensors by name; other values are returned unchanged."""
    if not isinstance(tensors, Mapping):
        return tensors
    return {name: one.shape if isinstance(one, Tensor) else one for name, one in tensors.items()}


def _is_writable(buffer: Tensor) -> bool:
    return is_plain(buffer) and buffer.layout is torch.strided and not overlaps_itself(buffer)


class CopiedBuffer(NamedTuple):
    """A buffer and its values before a swap, in which it may be converted or replaced."""

    owner: nn.Module
    name: str
    buffer: Tensor
    values: Tensor
    average: Tensor | None

    def write_average(self) -> None:
        """Write the average to the buffer."""
        if self.average is not None:
            self.buffer.detach().copy_(self.average)

    def restore(self) -> None:
        """Give the module its buffer back, on the device to which it may have been moved."""
        self.buffer.detach().copy_(self.values)
        current = getattr(self.owner, self.name)
        if current is not self.buffer:
            setattr(self.owner, self.name, self.buffer if current is None else self.buffer.to(current.device))
