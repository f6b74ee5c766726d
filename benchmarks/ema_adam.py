"""A step of FusedEmaAdam against AdamW and the EMA of swa_utils: ``python -m benchmarks.ema_adam``."""

from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks._harness import Call, interleaved, peak_memory, print_table

_PEER = "AdamW(fused=True), swa_utils EMA"
_LIMIT = "copy of as many bytes"
_EMA_DECAY = 0.9999


def _make_model(count: int, size: int) -> nn.ParameterList:
    model = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(count))
    for weight in model:
        weight.grad = torch.randn(size)
    return model


def _step_with_swa_utils(model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_EMA_DECAY))
    averaged.update_parameters(model)

    def step() -> None:
        optimizer.step()
        averaged.update_parameters(model)

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
    fused, foreach, ours = (_make_model(count, size) for _ in range(3))
    return {
        _PEER: _step_with_swa_utils(fused, torch.optim.AdamW(fused.parameters(), fused=True)),
        "AdamW(foreach=True), swa_utils EMA": _step_with_swa_utils(
            foreach, torch.optim.AdamW(foreach.parameters(), foreach=True)
        ),
        "FusedEmaAdam": FusedEmaAdam(ours.parameters(), ema_decay=_EMA_DECAY).step,
        _LIMIT: _copy(count, size),
    }


def main(rounds: int = 30) -> None:
    """Print a table for float32 parameters of three sizes."""
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
    main()
