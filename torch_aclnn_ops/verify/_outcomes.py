"""Run all checks on a device, and note what became of each."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch_aclnn_ops import _extension, doctor, ops
from torch_aclnn_ops.verify import _measures, _operators, _optimizer, _refusals

import torch


class Outcome(NamedTuple):
    """What became of a check.

    Attributes:
        group: ``"operator"``, ``"refusal"``, ``"optimizer"``, ``"launches"`` or ``"measured"``.
        name: What was checked.
        is_right: Whether the result is right; ``None`` for what is only measured.
        detail: The error that was found, or the measured value.
    """

    group: str
    name: str
    is_right: bool | None
    detail: str


def verify(device: str = "npu", quick: bool = False) -> Iterator[Outcome]:
    """Check every operator, its refusals and the optimizer on a device.

    Args:
        device: ``"npu"`` or ``"cpu"``; a CPU has no refusals of CANN and no launches.
        quick: Do fewer steps of the optimizer, and measure nothing.

    Returns:
        The outcomes, one after the other, as they are known.

    Example:
        >>> next(verify("cpu", quick=True))._replace(detail="")
        Outcome(group='operator', name='binary_cross_entropy, torch.float64', is_right=True, detail='')
    """
    torch.manual_seed(0)
    checks = [("operator", _operators.checks(device)), ("optimizer", _optimizer.checks(device, 20 if quick else 200))]
    if device == "npu":
        checks += [("refusal", _refusals.checks(device)), ("launches", iter([("every operator of CANN", _launches)]))]
    for group, (name, check) in itertools.chain(*([(group, one) for one in each] for group, each in checks)):
        yield Outcome(group, name, *_outcome(check))
    if not quick:
        yield from (Outcome("measured", name, None, value) for name, value in _measures.measures(device))


def _outcome(check: Callable[[], str]) -> tuple[bool, str]:
    """Run a check, which returns what it has found or raises."""
    try:
        return True, check()
    except Exception as error:  # whatever it is, the table goes on, and says it
        lines = str(error).strip().splitlines() or [""]
        return False, doctor.without_names(f"{type(error).__name__}: {lines[0]}")


def _launches() -> str:
    torch.npu.synchronize()  # type: ignore[attr-defined]
    launches = _extension.launches()
    missing = [name for name in (getattr(ops, operator).cann for operator in ops.__all__) if not launches.get(name)]
    if missing:
        raise RuntimeError(f"not launched: {', '.join(missing)}")
    return f"{sum(launches.values())} launches"
