"""What the host knows of the steps on a device: the counts of the parameters, and whether a graph may repeat them."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch_aclnn_ops._torch_compat.optimizer import version_of

import torch
from torch import Tensor


class Captures:
    """Whether steps of an optimizer were captured in graphs, which may be replayed at any time."""

    def __init__(self) -> None:
        self.has_captured = False
        self.has_compiled = False  # a compiled step may be captured without a call of this class
        self._types: set[str] = set()

    def observe(self, groups: list[dict[str, Any]], have_moved: bool) -> None:
        """Note whether this step is captured."""
        if have_moved:
            self._types = {param.device.type for group in groups for param in group["params"]} - {"cpu", "meta"}
        self.has_captured = self.is_capturing() or self.has_captured

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured on a device of the parameters."""
        for module in map(torch.get_device_module, self._types):
            if hasattr(module, "is_current_stream_capturing"):
                module.current_device()  # raises in a forked process, where the next call would hang on an NPU
                if module.is_current_stream_capturing():
                    return True
        return False

    def before_new_states(self) -> None:
        """Raise if a captured step would initialize states, as each replay would; warn if it makes graphs obsolete."""
        if self.is_capturing():
            raise RuntimeError(
                "FusedEmaAdam.step: a captured step must not initialize states, because each replay would, too; call"
                " step() once before the capture, and after load_state_dict(), add_param_group(), a first gradient of a"
                " parameter, or new data of one"
            )
        if self.has_captured:
            warnings.warn(
                "FusedEmaAdam: graphs of earlier steps must be captured again, because the optimizer's states are new"
                " tensors after load_state_dict(), add_param_group(), a first gradient of a parameter, or new data of"
                " one",
                stacklevel=8,
            )


class StepCounts:
    """Step counts of parameters, as known on the host without synchronization.

    Once only the device knows how many steps are made, they are other objects, which are the same for parameters whose
    counts are certainly equal, and remain so if a graph that updates some of them is replayed.

    Args:
        steps: Tensors of one or several step counts.
    """

    def __init__(self, steps: Sequence[Tensor]) -> None:
        self.values: list[Any] = []
        self.are_exact = True
        self._may_be_replayed = False
        self._steps = steps
        self._places = {id(step): i for i, step in enumerate(steps)}
        self._versions: list[int] = []  # of the steps that the values belong to; empty to read them again
        if any(step.is_inference() for step in steps):  # which have no versions
            self.are_exact = False

    def observe(self, found_inf: Tensor | None, captures: Captures) -> None:
        """Note whether the device may skip this step, or a captured graph may make others."""
        self._may_be_replayed = captures.has_captured or captures.has_compiled
        self.are_exact &= not self._may_be_replayed and (found_inf is None or found_inf.is_cpu)

    def read(self) -> None:
        """Read the counts, on a device only if they were modified outside of the optimizer.

        Then they are no longer exact: a compiled step, which modifies them, may be part of a graph.
        """
        if self._steps[0].is_cpu:  # also after writes without a new version, as by dist.broadcast
            self.values = self._read()
            return
        versions = list(map(version_of, self._steps))
        if versions != self._versions:
            self.are_exact &= not self._versions
            counts = self._read()
            self.values = [object() for _ in counts] if self._may_be_replayed else counts
            self._versions = versions

    def _read(self) -> list[int]:
        counts: list[int] = torch.cat([step.reshape(-1) for step in self._steps]).tolist()
        return counts

    def forget(self) -> None:
        """Read the counts again before the next step, because the optimizer writes them."""
        self._versions = []

    def record(self, stepped: Iterable[int]) -> None:
        """Record a completed step of the parameters at these places."""
        counts_after: defaultdict[Any, object] = defaultdict(object)
        for i in stepped:
            count = self.values[i]
            # A skipped step must not seem to make counts equal, if only some of the parameters have a gradient.
            self.values[i] = count + 1 if self.are_exact else counts_after[count]
        self._versions = list(map(version_of, self._steps))

    def places_of(self, steps: Iterable[Tensor]) -> list[int]:
        """Return the places of some of the tensors, each of which has one step count."""
        return [self._places[id(step)] for step in steps]
