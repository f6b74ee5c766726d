"""Random numbers of NPU operators, drawn by another thread while the CPU draws its own."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

_CPU_NUMBERS = 2000
_DRAWS: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: torch.rand(100_000, device="npu"),
    "normal": lambda: torch.randn_like(torch.empty(100_000, device="npu")),
    "permutation": lambda: torch.randperm(20_000, device="npu"),
    "choices": lambda: torch.multinomial(torch.ones(2000, device="npu"), 1000),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(100_000, device="npu")),
}


def _cpu_numbers() -> list[float]:
    return [torch.rand(1).item() for _ in range(_CPU_NUMBERS)]


def _beside(draw: Callable[[], Tensor]) -> tuple[list[float], list[Tensor]]:
    """Return the CPU's numbers, and those that another thread draws on the NPU at the same time."""
    drawn: list[Tensor] = []
    has_begun, is_over = threading.Event(), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            drawn.append(draw())
            has_begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert has_begun.wait(60)
        return _cpu_numbers(), drawn
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("name", _DRAWS)
def test_threads_that_draw_on_the_npu_and_on_the_cpu_do_not_disturb_each_other(name):
    draw = _DRAWS[name]
    torch.manual_seed(1)
    on_cpu, on_npu = _cpu_numbers(), [draw() for _ in range(3)]
    torch.manual_seed(1)
    beside_npu, beside_cpu = _beside(draw)
    assert beside_npu == on_cpu
    for actual, expected in zip(beside_cpu, on_npu, strict=False):
        assert torch.equal(actual, expected)
