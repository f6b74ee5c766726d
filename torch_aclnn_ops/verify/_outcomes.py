"""Run all checks on a device."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch_aclnn_ops import _extension, doctor, ops
from torch_aclnn_ops.verify import _measures, _operators, _optimizer, _refusals

import torch


class Outcome(NamedTuple):
    """The outcome of a check.

    Attributes:
        group: ``"operator"``, ``"refusal"``, ``"optimizer"``, ``"launches"`` or ``"measured"``.
        name: What was checked.
        is_right: Whether the result is correct; ``None`` for a measurement, unless it fails.
        detail: The error, or the measured value.
    """

    group: str
    name: str
    is_right: bool | None
    detail: str


def verify(device: str = "npu", quick: bool = False) -> Iterator[Outcome]:
    """Check every operator, its errors and the optimizer on a device.

    Args:
        device: ``"npu"`` or ``"cpu"``; on the CPU, CANN's errors and launches are not checked.
        quick: Run fewer steps of the optimizer, and skip measurements.

    Returns:
        An iterator that runs a check and yields its outcome at a time.

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
        for name, measure in _measures.measures(device):
            has_result, detail = _outcome(measure)
            yield Outcome("measured", name, None if has_result else False, detail)


def _outcome(check: Callable[[], str]) -> tuple[bool, str]:
    """Run a check; return whether it passed, and its result or error."""
    try:
        return True, check()
    except Exception as error:  # reported in the table; the other checks still run
        lines = str(error).strip().splitlines() or [""]
        return False, doctor.without_names(f"{type(error).__name__}: {lines[0]}")


def _launches() -> str:
    torch.npu.synchronize()  # type: ignore[attr-defined]
    launches = _extension.launches()
    expected = [getattr(ops, operator).cann for operator in _operators.launched_on("npu")]
    missing = [name for name in expected if not launches.get(name)]
    if missing:
        raise RuntimeError(f"not launched: {', '.join(missing)}")
    return f"{sum(launches.values())} launches"
