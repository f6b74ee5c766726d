"""Steps that are captured in a graph, which may be replayed at any time."""

import warnings
from typing import Any

from torch_aclnn_ops.optim.options import EmaSchedule

import torch
from torch import Tensor

_NEW_STATES = "load_state_dict(), add_param_group(), a first gradient of a parameter, or new data of one"


class Captures:
    """Whether steps of an optimizer are, or were, captured."""

    def __init__(self) -> None:
        self.has_captured = self.is_capturing = False
        self.has_compiled = False  # a compiled step may be captured without a call of this class
        self._types: set[str] = set()

    def observe(self, groups: list[dict[str, Any]], schedules: list[EmaSchedule], have_moved: bool) -> None:
        """Note whether this step is captured; raise if a group's EMA decay depends on the step."""
        if have_moved:
            self._types = {param.device.type for group in groups for param in group["params"]} - {"cpu", "meta"}
        self.is_capturing = any(map(_is_capturing, self._types))
        self.has_captured |= self.is_capturing
        for i, schedule in enumerate(schedules if self.is_capturing else ()):
            if not schedule.is_constant:
                raise RuntimeError(
                    "FusedEmaAdam.step: a captured step must have a constant EMA decay, because each replay uses that"
                    f" of the capture, but group {i} has ema_warmup={schedule.ema_warmup!r},"
                    f" ema_start_step={schedule.ema_start_step} and ema_update_every={schedule.ema_update_every}; use"
                    " None, 0 and 1, or do not capture the step"
                )

    def are_counts_known(self, found_inf: Tensor | None) -> bool:
        """Return whether the host knows the steps of a device, which may skip some, and repeat captured ones."""
        may_be_replayed = self.has_captured or self.has_compiled
        return not may_be_replayed and (found_inf is None or found_inf.is_cpu)

    def before_new_states(self) -> None:
        """Raise if a captured step would initialize states, as each replay would; warn if it makes graphs obsolete."""
        if self.is_capturing:
            raise RuntimeError(
                "FusedEmaAdam.step: a captured step must not initialize states, because each replay would, too; call"
                f" step() once before the capture, and after {_NEW_STATES}"
            )
        if self.has_captured:
            warnings.warn(
                "FusedEmaAdam: graphs of earlier steps must be captured again, because the optimizer's states are new"
                f" tensors after {_NEW_STATES}",
                stacklevel=10,
            )


def _is_capturing(device_type: str) -> bool:
    """Return whether a graph is being captured on the current device of a type."""
    module = torch.get_device_module(device_type)
    if not hasattr(module, "is_current_stream_capturing"):
        return False
    module.current_device()  # raises in a forked process, where the next call would hang on an NPU
    return bool(module.is_current_stream_capturing())
