"""A step of FusedEmaAdam against AdamW with the EMA of swa_utils and of timm: ``python -m benchmarks.ema_adam``."""

import importlib.util
import runpy
import sys
from pathlib import Path

from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks._harness import Call, interleaved, peak_memory, print_table

_PEER = "AdamW(fused=True), swa_utils EMA"
_TIMM = "AdamW(fused=True), timm ModelEmaV3"
_LIMIT = "copy of as many bytes"
_EMA_DECAY = 0.9999


class _Model(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count))
        for weight in self.weights:
            weight.grad = torch.randn(size)


def _step_with_swa_utils(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_EMA_DECAY))
    averaged.update_parameters(model)

    def step() -> None:
        optimizer.step()
        averaged.update_parameters(model)

    return step


def _step_with_timm(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call | None:
    # The package itself would import torchvision, which the file does not need.
    package = importlib.util.find_spec("timm")
    if package is None or package.origin is None:
        return None
    source = Path(package.origin).parent / "utils" / "model_ema.py"
    averaged = runpy.run_path(str(source))["ModelEmaV3"](model, decay=_EMA_DECAY)

    def step() -> None:
        optimizer.step()
        averaged.update(model)

    return step


def _step_of_new_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
    """Make a step as after ``zero_grad()``: every gradient is a new tensor."""
    grads = [weight.grad for weight in model.parameters()]

    def step() -> None:
        for weight, grad in zip(model.parameters(), grads, strict=True):
            weight.grad = grad
        optimizer.step()

    return step


def _copy(count: int, size: int) -> Call:
    """Move the bytes that a step must move: it reads five tensors, and writes all of them but the gradient.

    A step may go below this: it writes where it has just read, and a copy has to fetch what it writes over.
    """
    source, target = torch.randn(2, count * size)
    half = count * size // 2

    def copy() -> None:
        for _ in range(4):
            target.copy_(source)
        target[:half].copy_(source[:half])

    return copy


def _make_cases(count: int, size: int) -> dict[str, Call]:
    fused, fused_too, foreach, ours, flat, new = (_Model(count, size) for _ in range(6))
    cases = {
        _PEER: _step_with_swa_utils(fused, torch.optim.AdamW(fused.parameters(), fused=True)),
        "AdamW(foreach=True), swa_utils EMA": _step_with_swa_utils(
            foreach, torch.optim.AdamW(foreach.parameters(), foreach=True)
        ),
        "FusedEmaAdam": FusedEmaAdam(ours.parameters(), ema_decay=_EMA_DECAY).step,
        "FusedEmaAdam(flatten=True)": FusedEmaAdam(flat.parameters(), ema_decay=_EMA_DECAY, flatten=True).step,
        "FusedEmaAdam(flatten=True), new gradients": _step_of_new_gradients(
            new, FusedEmaAdam(new.parameters(), ema_decay=_EMA_DECAY, flatten=True)
        ),
        _LIMIT: _copy(count, size),
    }
    with_timm = _step_with_timm(fused_too, torch.optim.AdamW(fused_too.parameters(), fused=True))
    return cases if with_timm is None else {**cases, _TIMM: with_timm}


def main(rounds: int = 30) -> None:
    """Print a table for float32 parameters of three sizes; timm is compared where it is installed."""
    torch.set_num_threads(2)
    rows = []
    for count, size in ((200, 50_000), (20, 1_000_000), (2000, 256)):
        cases = _make_cases(count, size)
        timings = interleaved(cases, rounds)
        rows += [
            {
                "what": f"{count} x {size}",
                "by": name,
                "median ms": f"{timing.median * 1e3:.2f}",
                "minimum ms": f"{timing.minimum * 1e3:.2f}",
                "ratio of medians": f"{timing.median / timings[_PEER].median:.2f}",
                "ratio of minima": f"{timing.minimum / timings[_PEER].minimum:.2f}",
                "ratio of minima to the copy": f"{timing.minimum / timings[_LIMIT].minimum:.2f}",
                "peak MB": f"{peak_memory(cases[name]) / 1e6:.1f}",
            }
            for name, timing in timings.items()
        ]
    print_table(rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
