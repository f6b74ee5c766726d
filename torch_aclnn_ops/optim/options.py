"""Parsing and checking of a parameter group's options: those of a step, and the EMA schedule."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

from torch_aclnn_ops._checks import POSITIVE, Rule, check_bool, check_number
from torch_aclnn_ops._cpu_extension import contents, holds
from torch_aclnn_ops.functional.ema_adam import check_options
from torch_aclnn_ops.ops.ema_adam import Options

import torch
from torch import Tensor

# Options of torch's AdamW that FusedEmaAdam lacks.
LACKING = ("foreach", "fused", "capturable", "amsgrad", "differentiable")
_SCHEDULE_RULES: dict[str, Rule] = {
    "ema_warmup_gamma": POSITIVE,
    "ema_warmup_power": POSITIVE,
    "ema_start_step": (int, "an int", "at least 0", lambda number: number >= 0),
    "ema_update_every": (int, "an int", "at least 1", lambda number: number >= 1),
}
_P = ParamSpec("_P")
_ADAM = ("eps", "weight_decay", "decoupled_weight_decay", "bias_correction", "maximize")  # in the order of Options


def without_lacking(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate ``__init__`` to ignore options that the optimizer lacks if they are off, and to raise if they are on."""

    @wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        check_lacking(kwargs)
        for name in set(LACKING) & kwargs.keys():
            del kwargs[name]
        init(*args, **kwargs)

    return checked


def check_lacking(options: Mapping[str, Any]) -> None:
    """Raise for an option in ``LACKING`` that is not ``None``, ``False`` or 0, as in groups of torch's optimizers."""
    for name in LACKING:
        if options.get(name):
            raise TypeError(
                f"FusedEmaAdam: {name} must not be given, but it is {options[name]!r}; leave it out: the step is always"
                " fused, and only torch's own AdamW has amsgrad and differentiable"
            )


def check_group(group: Mapping[Any, Any], flatten: bool) -> None:
    """Raise for a new parameter group with options that it must not have.

    ``flatten`` is that of the optimizer; ZeroRedundancyOptimizer copies it to the groups.
    """
    if "ema_buffers" in group:
        raise TypeError(
            "FusedEmaAdam: ema_buffers is an argument of the constructor and must not be in a parameter group, where"
            " ZeroRedundancyOptimizer puts it"
        )
    check_lacking(group)
    if group.get("flatten", flatten) is not flatten:
        raise TypeError(
            f"FusedEmaAdam: flatten is an argument of the constructor and must be {flatten} in every parameter group,"
            f" but it is {group['flatten']!r}"
        )


def options_of(group: dict[str, Any]) -> tuple[Options, "EmaSchedule"]:
    """Parse the options of a parameter group; raise if one has the wrong type or is out of range."""
    betas = group["betas"]
    is_sequence = isinstance(betas, (tuple, list))
    # check_options refuses a pair of tensors.
    if not is_sequence or len(betas) != 2 or isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        error = ValueError if is_sequence else TypeError
        raise error(f"FusedEmaAdam: betas must be a pair of numbers, but it is {betas!r}")
    options = Options(group["lr"], group["ema_decay"], *betas, *[group[name] for name in _ADAM])
    check_options(options)
    if isinstance(options.ema_decay, Tensor):
        raise TypeError(f"FusedEmaAdam: ema_decay must be a number, but it is {options.ema_decay!r}")
    for name in ("master_weights", "ema_without_grad"):
        check_bool("FusedEmaAdam", name, group[name])
    schedule = EmaSchedule(*[group[name] for name in EmaSchedule._fields])
    schedule.check()
    return options, schedule


class CheckedOptions:
    """Cached options of a group, which are parsed again if any of them is a different object."""

    def __init__(self) -> None:
        self._items: list[object] = []
        self._parsed: tuple[Options, EmaSchedule] | None = None

    def of(self, group: dict[str, Any]) -> "tuple[Options, EmaSchedule]":
        """Return the parsed options of a group."""
        # Tensors and lists are mutable.
        is_fixed = not isinstance(group["lr"], Tensor) and isinstance(group["betas"], tuple)
        if self._parsed is None or not (is_fixed and holds([group], self._items)):
            self._items, self._parsed = contents([group]), options_of(group)
        return self._parsed


class EmaSchedule(NamedTuple):
    """The EMA schedule of a parameter group; the fields are options of the group.

    It depends only on the parameter's ``step``, so it resumes from a checkpoint, and does not advance in skipped steps.
    """

    ema_decay: float
    ema_warmup: str | None
    ema_warmup_gamma: float
    ema_warmup_power: float
    ema_start_step: int
    ema_update_every: int

    @property
    def is_constant(self) -> bool:
        """Whether the decay is the same in every step."""
        return self.ema_warmup is None and self.ema_start_step == 0 and self.ema_update_every == 1

    def decay_at(self, step: int) -> float:
        """Return the decay of a step, counted from 1."""
        if step <= self.ema_start_step:
            return 0.0
        if (step - self.ema_start_step) % self.ema_update_every:
            return 1.0
        update = (step - self.ema_start_step) // self.ema_update_every
        return self.ema_decay if self.ema_warmup is None else min(self.ema_decay, float(self._warmed_up(update)))

    def decays_at(self, steps: Tensor) -> Tensor:
        """Return the decays of steps on a device, as a tensor of float32, or of float64 on a CPU."""
        since_start, dtype = steps - self.ema_start_step, torch.float64 if steps.is_cpu else torch.float32
        update = (since_start.clamp(min=0) // self.ema_update_every).to(dtype)
        if self.ema_warmup is None:
            decays = torch.full_like(update, self.ema_decay)
        else:
            decays = self._warmed_up(update).clamp(max=self.ema_decay)
        if self.ema_update_every > 1:
            decays = decays.masked_fill(since_start % self.ema_update_every != 0, 1.0)
        return decays.masked_fill(since_start <= 0, 0.0)

    def _warmed_up(self, update: Any) -> Any:
        """Return the warm-up's upper bound of the decay: a number for one update, or a tensor for several."""
        if self.ema_warmup == "ratio":
            return (1 + update) / (10 + update)
        return 1 - (1 + update / self.ema_warmup_gamma) ** -self.ema_warmup_power

    def check(self) -> None:
        """Raise if an option has the wrong type or is out of range."""
        if self.ema_warmup not in (None, "ratio", "power"):
            raise ValueError(
                f"FusedEmaAdam: ema_warmup must be None, 'ratio' or 'power', but it is {self.ema_warmup!r}"
            )
        for name, rule in _SCHEDULE_RULES.items():
            check_number("FusedEmaAdam", name, getattr(self, name), rule)
