"""How much of the average is kept in a step: the warm-up, the first step, and the steps between two updates."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WARMUPS = (None, "ratio", "power")


class EmaSchedule(NamedTuple):
    """The options of a parameter group that say how its averages are kept, in the group's names.

    The only counter is the parameter's ``step``, so a schedule goes on after a checkpoint is loaded, and stands still
    in a step that is skipped.
    """

    ema_decay: float
    ema_warmup: str | None
    ema_warmup_gamma: float
    ema_warmup_power: float
    ema_start_step: int
    ema_update_every: int

    @classmethod
    def of(cls, group: dict[str, Any]) -> "EmaSchedule":
        """Take the options from a parameter group; raise where one is of another type or out of range."""
        schedule = cls(*(group[name] for name in cls._fields))
        schedule._check()
        return schedule

    @property
    def is_constant(self) -> bool:
        """Whether every step has the same decay."""
        return self.ema_warmup is None and self.ema_start_step == 0 and self.ema_update_every == 1

    def decay_at(self, step: int) -> float:
        """Return the decay of a step; the first step is 1."""
        if step <= self.ema_start_step:
            return 0.0
        if (step - self.ema_start_step) % self.ema_update_every:
            return 1.0
        update = (step - self.ema_start_step) // self.ema_update_every
        if self.ema_warmup == "ratio":
            return min(self.ema_decay, (1 + update) / (10 + update))
        if self.ema_warmup == "power":
            return min(self.ema_decay, 1 - float((1 + update / self.ema_warmup_gamma) ** -self.ema_warmup_power))
        return self.ema_decay

    def decays_at(self, steps: Tensor) -> Tensor:
        """Return the decays of steps that the host does not know, as float32 on their device."""
        since_start = steps - self.ema_start_step
        update = (since_start.clamp(min=0) // self.ema_update_every).to(torch.float32)
        if self.ema_warmup == "ratio":
            decays = ((1 + update) / (10 + update)).clamp(max=self.ema_decay)
        elif self.ema_warmup == "power":
            powers = (1 + update / self.ema_warmup_gamma) ** -self.ema_warmup_power
            decays = (1 - powers).clamp(max=self.ema_decay)
        else:
            decays = torch.full_like(update, self.ema_decay)
        if self.ema_update_every > 1:
            decays = decays.masked_fill(since_start % self.ema_update_every != 0, 1.0)
        return decays.masked_fill(since_start <= 0, 0.0)

    def _check(self) -> None:
        if self.ema_warmup not in _WARMUPS:
            raise ValueError(
                f"FusedEmaAdam: ema_warmup must be None, 'ratio' or 'power', but it is {self.ema_warmup!r}"
            )
        for name in ("ema_warmup_gamma", "ema_warmup_power"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                raise TypeError(f"FusedEmaAdam: {name} must be a number, but it is {value!r}")
            _require(0 < value < math.inf, name, "finite and above 0", value)
        for name, least in (("ema_start_step", 0), ("ema_update_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"FusedEmaAdam: {name} must be an int, but it is {value!r}")
            _require(value >= least, name, f"at least {least}", value)


def _require(condition: bool, name: str, accepted: str, value: float) -> None:
    if not condition:
        raise ValueError(f"FusedEmaAdam: {name} must be {accepted}, but it is {value}")
