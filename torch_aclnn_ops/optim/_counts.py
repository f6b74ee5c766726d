"""The step counts of parameters, as known on the host."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch_aclnn_ops._torch_compat.optimizer import version_of

import torch
from torch import Tensor


class StepCounts:
    """Step counts of parameters, as known on the host without synchronization.

    Once only the device knows how many steps are made, they are other objects, which are the same for parameters whose
    counts are certainly equal.

    Args:
        steps: Tensors of one or several step counts.
    """

    def __init__(self, steps: Sequence[Tensor]) -> None:
        self.values: list[Any] = []
        self.are_exact = True
        self._steps = steps
        self._places = {id(step): i for i, step in enumerate(steps)}
        self._versions: list[int] = []  # of the steps that the values belong to; empty to read them again

    def observe(self, found_inf: Tensor | None, has_captured: bool) -> None:
        """Note whether the device may skip this step, or a captured graph may make others."""
        self.are_exact &= not has_captured and (found_inf is None or found_inf.is_cpu)

    def read(self) -> None:
        """Read the counts, with a synchronization, if they were modified outside of the optimizer."""
        versions = list(map(version_of, self._steps))
        if versions != self._versions:
            self.values = torch.cat([step.reshape(-1) for step in self._steps]).tolist()
            self._versions = versions

    def forget(self) -> None:
        """Read the counts again after an exception, which leaves :meth:`record` out."""
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


def is_capturing(groups: list[dict[str, Any]]) -> bool:
    """Return whether a graph is being captured on the device of a parameter group; it may be replayed at any time."""
    types = {group["params"][0].device.type for group in groups if group["params"]} - {"cpu", "meta"}
    return any(getattr(torch.get_device_module(name), "is_current_stream_capturing", bool)() for name in types)
