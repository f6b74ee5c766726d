"""How the benchmarks measure: one process, the cases in turn, and memory as the kernel counts it."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# torch_aclnn_ops goes before torch, see torch_aclnn_ops/_torch_npu.py.
import torch_aclnn_ops  # noqa: F401

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over several rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """The fastest round, the least disturbed one."""
        return min(self.seconds)


def interleaved(cases: Mapping[str, Call], rounds: int) -> dict[str, Timing]:
    """Time every case once a round, so that a change of the machine's speed meets all of them.

    Every other round goes backwards, because a call is faster where it finds the memory that another has just freed.

    Args:
        cases: calls by name; one uncounted round warms them up.
        rounds: counted rounds.

    Returns:
        Timings by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    turns = list(cases.items())
    for call in cases.values():
        call()
    for number in range(rounds):
        for name, call in turns[::-1] if number % 2 else turns:
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def peak_memory(call: Call) -> int:
    """Return the bytes of memory that a call needs beyond what was there before it (Linux).

    Writing 5 to clear_refs resets the peak (VmHWM) to what is resident now. It counts pages, of all libraries.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the call could reuse what earlier ones have freed, and need nothing
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = status_bytes("VmRSS")
    call()
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """Return a field of the process's status that is a size, such as ``VmRSS``, in bytes (Linux)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def forward_and_backward(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, **options: object) -> Call:
    """Make a call that computes a loss and the gradients of the inputs that require them."""
    trained = [tensor for tensor in inputs if tensor.requires_grad]

    def call() -> None:
        output = function(*inputs, **options)
        torch.autograd.grad(output, trained, torch.ones_like(output))

    return call


def compare(name: str, cases: Mapping[str, Call], rounds: int) -> list[dict[str, str]]:
    """Measure cases against the first of them, the reference; return table rows."""
    memory = {case: peak_memory(call) for case, call in cases.items() for _ in [call()]}
    timings = interleaved(cases, rounds)
    reference = next(iter(timings.values()))
    return [
        {
            "what": name,
            "by": case,
            "median ms": f"{timing.median * 1e3:.2f}",
            "minimum ms": f"{timing.minimum * 1e3:.2f}",
            "ratio of medians": f"{timing.median / reference.median:.2f}",
            "ratio of minima": f"{timing.minimum / reference.minimum:.2f}",
            "peak MB": f"{memory[case] / 1e6:.0f}",
        }
        for case, timing in timings.items()
    ]


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows as a Markdown table."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = (names, ["-" * widths[name] for name in names], *([row[name] for name in names] for row in rows))
    return "\n".join(
        "| " + " | ".join(cell.ljust(widths[name]) for name, cell in zip(names, cells, strict=True)) + " |"
        for cells in lines
    )


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows as a Markdown table."""
    print(format_table(rows))
