"""How the benchmarks measure: one process, the cases in turn, and memory as the kernel counts it."""

import argparse
import ctypes
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# torch_aclnn_ops goes before torch, see torch_aclnn_ops/_torch_npu.py.
import torch_aclnn_ops

import host_npu
import torch

from benchmarks._results import CORES, Row, as_text, path_of, print_rows, write

Call = Callable[[], object]

LIMIT = "limit: "  # begins the name of what no implementation can be expected to beat
TORCH, OURS = "torch", "torch_aclnn_ops"
_DOUBLINGS = 6
_SHORTEST_ROUND = 0.002  # seconds; shorter calls are repeated in a round
_MOST_CALLS = 100
_FEWEST_ROUNDS = 3
_LONGEST_COMPARISON = 20.0  # seconds of all rounds together


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


def interleaved(
    cases: Mapping[str, Call],
    rounds: int,
    is_warm: bool = False,
    before: Call = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every case once a round, so that a change of the machine's speed meets all of them.

    Every other round goes backwards, because a call is faster where it finds the memory that another has just freed.

    Args:
        cases: calls by name.
        rounds: counted rounds.
        is_warm: leave out the uncounted round that warms them up.
        before: called before each call, and not timed.
        clock: returns seconds.

    Returns:
        Timings by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    turns = list(cases.items())
    for call in () if is_warm else cases.values():
        call()
    for number in range(rounds):
        for name, call in turns[::-1] if number % 2 else turns:
            before()
            start = clock()
            call()
            seconds[name].append(clock() - start)
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


def copy_of(count: int) -> Call:
    """Make a call that moves so many bytes, half of them read and half written, in memory that is there."""
    source, target = torch.ones(2, max(count // 8, 1))
    return lambda: target.copy_(source)


def compare(
    cases: Mapping[str, Call],
    rounds: int,
    wait: Call | None = None,
    before: Call = lambda: None,
    calls: int | None = None,
    least_bytes: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    **columns: object,
) -> list[Row]:
    """Measure cases against the first of them, the reference.

    Args:
        cases: calls by name.
        rounds: the most rounds; slow calls get fewer, so that a comparison is done in about 20 seconds.
        wait: waits for a device at the end of a round.
        before: waits for a device before a round, which is then not timed.
        calls: of a case in a round; by default enough for 2 ms of the fastest case.
        least_bytes: what the results take, which is the memory of the limit; without it no memory is measured.
        device: of the calls.
        dtype: of the calls.
        **columns: what the rows say besides.

    Returns:
        A row for each case; seconds are those of a single call.
    """
    alone = interleaved(cases, 1)
    memory = {}
    if least_bytes is not None:
        memory = {by: least_bytes if by.startswith(LIMIT) else peak_memory(call) for by, call in cases.items()}
    if calls is None:
        fastest = min(timing.minimum for timing in alone.values())
        calls = max(1, min(_MOST_CALLS, int(_SHORTEST_ROUND / fastest)))
    whole_round = calls * sum(timing.minimum for timing in alone.values())
    rounds = min(rounds, max(_FEWEST_ROUNDS, int(_LONGEST_COMPARISON / whole_round)))
    timings = interleaved(
        {by: repeated(call, calls, wait) for by, call in cases.items()}, rounds, is_warm=True, before=before
    )
    reference = next(iter(timings.values()))
    rows = [
        {
            **columns,
            "device": device,
            "dtype": dtype,
            "by": by,
            "status": "measured",
            "rounds": rounds,
            "median_s": timing.median / calls,
            "minimum_s": timing.minimum / calls,
            "ratio_of_medians": timing.median / reference.median,
            "ratio_of_minima": timing.minimum / reference.minimum,
            **({"peak_bytes": memory[by]} if memory else {}),
        }
        for by, timing in timings.items()
    ]
    for row in rows:
        report(row)
    return rows


def report(row: Row) -> None:
    """Print a result as soon as it is known, because a benchmark can take many minutes."""
    [cells] = as_text([row])
    report_cells(cells)


def report_cells(cells: Mapping[str, str]) -> None:
    """Print a row of a table as soon as it is known; the table itself, on stdout, comes at the end."""
    print(", ".join(f"{name} {cell}" for name, cell in cells.items() if cell), file=sys.stderr, flush=True)


def repeated(call: Call, calls: int, wait: Call | None = None) -> Call:
    """Make so many calls one, at whose end ``wait`` waits for a device."""

    def all_of_them() -> None:
        for _ in range(calls):
            call()
        if wait is not None:
            wait()

    return all_of_them


def use_npu(device: str = "npu") -> None:
    """Let the host NPU stand in for an NPU if one is asked for and there is none."""
    if device == "npu":
        if not hasattr(torch, "npu"):
            host_npu.enable()
        torch.npu.set_compile_mode(jit_compile=False)


def doublings(largest: int, quick: bool = False) -> list[int]:
    """Return the sizes of a sweep: six doublings up to the largest, or for a quick one the three smallest."""
    exponents = range(_DOUBLINGS, -1, -1)
    return [largest >> exponent for exponent in (exponents[:3] if quick else exponents)]


def absent(by: str, reason: str, **columns: object) -> Row:
    """Return the row of a peer that cannot be measured here."""
    return {**columns, "by": by, "status": f"absent: {reason}"}


def against_torch(
    options: argparse.Namespace,
    operator: str,
    largest: int,
    prepare: Callable[[torch.dtype, int], Callable[[Callable[..., torch.Tensor]], Call]],
    least: Callable[[int], int],
    moved: Callable[[int], int],
    **columns: object,
) -> list[Row]:
    """Compare forward and backward of a drop-in with torch's function and, unless it is to be quick, the compiled one.

    Args:
        options: of :func:`parser`, and ``rounds``.
        operator: the name of the function.
        largest: the end of the sizes.
        prepare: makes tensors of a dtype and a size, and returns what makes a call of a function with them.
        least: returns how many elements the results of a size have.
        moved: returns how many elements must be read or written for a size.
        **columns: what the rows say besides.
    """
    theirs = getattr(torch.nn.functional, operator)
    functions = {TORCH: theirs, OURS: getattr(torch_aclnn_ops.functional, operator)}
    if not options.quick:  # compiling takes a minute
        functions["torch.compile of torch's"] = torch.compile(theirs, dynamic=True)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in doublings(largest, options.quick):
            make = prepare(dtype, size)
            cases = {by: make(function) for by, function in functions.items()}
            cases[f"{LIMIT}copy of as many bytes"] = copy_of(moved(size) * dtype.itemsize)
            columns |= {"operator": operator, "dtype": str(dtype).removeprefix("torch."), "size": size}
            rows += compare(cases, options.rounds, least_bytes=least(size) * dtype.itemsize, **columns)
    return rows


def shapes(
    most: Mapping[str, int], others: Mapping[str, int], features: int, quick: bool
) -> Iterator[tuple[tuple[int, int, int], dict[str, object]]]:
    """Yield shapes of a head's problem with more and more rows or classes, and the columns that describe them."""
    for variable in most:
        [(other, count)] = [item for item in others.items() if item[0] != variable]
        for size in doublings(most[variable], quick):
            sizes = {other: count, variable: size}
            described = {"configuration": f"{count} {other}, {features} features", "variable": variable, "size": size}
            yield (sizes["rows"], features, sizes["classes"]), described


def is_installed(*packages: str) -> bool:
    """Return whether packages can be imported, without importing them."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="few sizes and rounds, to see that it runs")
    made.add_argument("--output", type=Path, help="folder of the CSV files; without it nothing is written")
    threads = min(2, CORES)
    made.add_argument("--threads", type=int, default=threads, help="threads of torch (default: %(default)s)")
    return made


def run(
    name: str, measure: Callable[[argparse.Namespace], list[Row]], options: argparse.Namespace, rounds: int = 0
) -> None:
    """Measure, print a table, and write it where the options say so.

    Args:
        name: of the file.
        measure: returns the rows; what ``options.rounds`` says is ``rounds``, or 3 for a quick run.
        options: of :func:`parser`.
        rounds: of a run that is not quick.
    """
    if rounds:
        options.rounds = _FEWEST_ROUNDS if options.quick else rounds
    torch.set_num_threads(options.threads)
    rows = measure(options)
    print_rows(rows)
    if options.output is not None:
        path = path_of(options.output, name)
        write(path, rows, options.threads)
        print(f"\nwritten to {path}")
