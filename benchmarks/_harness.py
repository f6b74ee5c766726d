"""The benchmark harness: cases run in turn in one process; memory is measured by the kernel."""

import argparse
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)

import host_npu
import torch

from benchmarks._results import CORES, Row, as_text, format_table, path_of, write

Call = Callable[[], object]

LIMIT = "limit: "  # prefix of the names of lower bounds
TORCH, OURS = "torch", "torch_aclnn_ops"
_DOUBLINGS = 6
_SHORTEST_ROUND = 0.002  # in seconds; shorter calls are repeated in a round
_MOST_CALLS = 100
_FEWEST_ROUNDS = 3
_LONGEST_COMPARISON = 20.0  # in seconds, of all rounds together


def interleaved(cases: Mapping[str, Call], rounds: int, before: Call = lambda: None) -> dict[str, list[float]]:
    """Return the seconds of every case in every round.

    Each round runs every case once, so that changes of the machine's speed affect all of them. Every other round runs
    backwards, because a call is faster if it finds memory that another has just freed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    turns = list(cases.items())
    for number in range(rounds):
        for name, call in turns[::-1] if number % 2 else turns:
            before()
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_memory(call: Call) -> int:
    """Return the bytes of memory that a call needs beyond those before it, the least of three calls (Linux).

    Writing 5 to clear_refs resets the peak (VmHWM) to the resident memory. The peak counts pages of all libraries and
    threads, so it includes memory that others free too late.
    """
    peaks = []
    for _ in range(3):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the call could reuse freed memory
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = status_bytes("VmRSS")
        call()
        peaks.append(status_bytes("VmHWM") - before)
    return min(peaks)


def status_bytes(field: str) -> int:
    """Return a size in the process's status, such as ``VmRSS``, in bytes (Linux)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def forward_and_backward(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, **options: object) -> Call:
    """Return a call that computes a loss and the gradients of the inputs that require them, and returns all of them."""
    trained = [tensor for tensor in inputs if tensor.requires_grad]

    def call() -> tuple[torch.Tensor, ...]:
        output = function(*inputs, **options)
        return output.detach(), *torch.autograd.grad(output, trained, torch.ones_like(output))

    return call


def copy_of(count: int) -> Call:
    """Return a call that moves this number of bytes, half of them read and half written, in allocated memory."""
    source, target = torch.ones(2, max(count // 8, 1))
    return lambda: target.copy_(source)


def compare(
    cases: Mapping[str, Call],
    rounds: int,
    wait: Call = lambda: None,
    before: Call = lambda: None,
    calls: int | None = None,
    least_bytes: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    **columns: object,
) -> list[Row]:
    """Measure cases against the first of them, the reference.

    Args:
        cases: Calls by name.
        rounds: The maximum number of rounds; slow calls get fewer, so that a comparison takes about 20 seconds.
        wait: Waits for a device at the end of a round.
        before: Waits for a device before a round, untimed.
        calls: The number of calls of a case in a round; by default enough for 2 ms of the fastest case.
        least_bytes: The size of the results, which is the memory of the limit; without it, memory is not measured.
        device: The device of the calls.
        dtype: The dtype of the calls.
        **columns: Further columns of the rows.

    Returns:
        A row for each case; seconds are per call.
    """
    alone = {by: seconds for by, [_, seconds] in interleaved(cases, 2).items()}
    memory = {}
    if least_bytes is not None:
        memory = {by: least_bytes if by.startswith(LIMIT) else peak_memory(call) for by, call in cases.items()}
    if calls is None:
        calls = max(1, min(_MOST_CALLS, int(_SHORTEST_ROUND / min(alone.values()))))
    rounds = min(rounds, max(_FEWEST_ROUNDS, int(_LONGEST_COMPARISON / (calls * sum(alone.values())))))
    timings = interleaved({by: _repeated(call, calls, wait) for by, call in cases.items()}, rounds, before)
    reference = next(iter(timings.values()))
    rows = [
        {
            **columns,
            "device": device,
            "dtype": dtype,
            "by": by,
            "rounds": rounds,
            "median_s": statistics.median(seconds) / calls,
            "minimum_s": min(seconds) / calls,
            "ratio_of_medians": statistics.median(seconds) / statistics.median(reference),
            "ratio_of_minima": min(seconds) / min(reference),
            **({"peak_bytes": memory[by]} if memory else {}),
        }
        for by, seconds in timings.items()
    ]
    for cells in as_text(rows):
        report_cells(cells)
    return rows


def report_cells(cells: Mapping[str, str]) -> None:
    """Print a row as soon as it is known, because a benchmark can take many minutes; the table comes last."""
    print(", ".join(f"{name} {cell}" for name, cell in cells.items() if cell), file=sys.stderr, flush=True)


def _repeated(call: Call, calls: int, wait: Call) -> Call:
    def all_of_them() -> None:
        for _ in range(calls):
            call()
        wait()

    return all_of_them


def use_npu(device: str = "npu") -> None:
    """Enable the host NPU if an NPU is requested and there is none."""
    if device == "npu":
        if not hasattr(torch, "npu"):
            host_npu.enable()
        torch.npu.set_compile_mode(jit_compile=False)


def doublings(largest: int, quick: bool = False) -> list[int]:
    """Return the sizes of a sweep: six doublings up to the largest, or the three smallest for a quick one."""
    exponents = range(_DOUBLINGS, -1, -1)
    return [largest >> exponent for exponent in (exponents[:3] if quick else exponents)]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="few sizes and rounds, to see that it runs")
    made.add_argument("--output", type=Path, help="folder of the CSV files; without it nothing is written")
    made.set_defaults(threads=min(2, CORES))
    return made


def run(
    name: str, measure: Callable[[argparse.Namespace], list[Row]], options: argparse.Namespace, rounds: int
) -> None:
    """Measure, print a table, and write it to a file if the options request it.

    Args:
        name: The name of the file.
        measure: Returns the rows; ``options.rounds`` is ``rounds``, or 3 for a quick run.
        options: The options of :func:`parser`, and torch's ``threads``.
        rounds: The number of rounds of a run that is not quick.
    """
    options.rounds = _FEWEST_ROUNDS if options.quick else rounds
    torch.set_num_threads(options.threads)
    rows = measure(options)
    print(format_table(as_text(rows)))
    if options.output is not None:
        path = path_of(options.output, name)
        write(path, rows, options.threads)
        print(f"\nwritten to {path}")
