"""Host time of a call on an NPU against torch_npu's own binding: ``python -m benchmarks.dispatch``.

Both sides call the same operator of the same CANN, so what differs is the way there. Without an NPU the host NPU stands
in for it, and its share is the same on both sides. Shapes are small, so that the device does not limit the calls.

``--instructions`` counts the instructions of the calling thread instead, with valgrind (minutes, and no noise).
"""

import argparse
import os
import statistics
import time
from functools import partial
from types import SimpleNamespace

import torch_aclnn_ops
from torch_aclnn_ops import _extension, host_npu

import torch

from benchmarks._harness import Call, print_table
from benchmarks._instructions import count_instructions, run_counted

OPERATORS = ("mse_loss_backward", "binary_cross_entropy_backward", "embedding_dense_backward")
# torch_npu's binding first; the last is what the package's own autograd functions call.
ENTRIES = ("torch.ops.aten", "torch.ops.torch_aclnn_ops", "torch_aclnn_ops.ops", "extension")
CALLS = 200  # between two waits for the device: fewer than the queue has places


def cases() -> dict[str, dict[str, Call]]:
    """Return a call of each operator, by each of its entries."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.rand(32, 16, generator=generator).npu() for _ in range(2))
    gradient = torch.ones(()).npu()
    indices = torch.randint(20, (32,), generator=generator).npu()
    arguments = {
        "mse_loss_backward": (gradient, one, two, 1),
        "binary_cross_entropy_backward": (gradient, one, two, None, 1),
        "embedding_dense_backward": (one, indices, 20, -1, False),
    }
    return {
        name: {by: partial(getattr(namespace, name), *arguments[name]) for by, namespace in _namespaces().items()}
        for name in OPERATORS
    }


def _namespaces() -> dict[str, object]:
    extension = SimpleNamespace(**_extension.entries)
    everything = (torch.ops.aten, torch.ops.torch_aclnn_ops, torch_aclnn_ops.ops, extension)
    return dict(zip(ENTRIES, everything, strict=True))


def time_calls(call: Call) -> tuple[float, float]:
    """Return the microseconds of a call: as the clock shows them, and of the calling thread's processor alone."""
    torch.npu.synchronize()
    wall, processor = time.perf_counter(), time.thread_time()
    for _ in range(CALLS):
        call()
    wall, processor = time.perf_counter() - wall, time.thread_time() - processor
    return wall / CALLS * 1e6, processor / CALLS * 1e6


def separate_threads() -> None:
    """Give the calling thread a processor, and the queue's and the device's threads the others.

    Where there are only two, the scheduler otherwise lets the queue's thread interrupt the caller that has woken it.
    """
    processors = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task") if len(processors) > 1 else ():
        own = int(thread) == os.getpid()
        os.sched_setaffinity(int(thread), processors[:1] if own else processors[1:])


def main(rounds: int = 150) -> None:
    """Print a table: microseconds of a call, and their ratio to torch_npu's."""
    torch.set_num_threads(1)
    torch.npu.set_compile_mode(jit_compile=False)
    rows = []
    calls = cases()  # after which the queue's thread runs
    separate_threads()
    for name, entries in calls.items():
        times: dict[str, list[tuple[float, float]]] = {by: [] for by in entries}
        for call in entries.values():
            time_calls(call)
        for _ in range(rounds):
            for by, call in entries.items():
                times[by].append(time_calls(call))
        for by, measured in times.items():
            row = {"operator": name, "by": by}
            for i, clock in enumerate(("wall", "thread")):
                for what, reduce in (("median", statistics.median), ("minimum", min)):
                    own, reference = (reduce(pair[i] for pair in values) for values in (measured, times[ENTRIES[0]]))
                    row[f"{clock} {what} us"] = f"{own:.2f}"
                    row[f"{clock} {what} ratio"] = f"{own / reference:.2f}"
            rows.append(row)
    print_table(rows)


def count(calls: int = 300) -> None:
    """Print a table: instructions of the calling thread in a call, as valgrind counts them."""
    rows = []
    for name in OPERATORS:
        counts = [count_instructions("benchmarks.dispatch", (name, by), calls) for by in ENTRIES]
        for by, instructions in zip(ENTRIES, counts, strict=True):
            ratio = instructions / counts[0]
            rows.append({"operator": name, "by": by, "instructions": f"{instructions:.0f}", "ratio": f"{ratio:.2f}"})
    print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind")
    parser.add_argument("--rounds", type=int, default=150, help="counted rounds of the clock")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instructions:
        count()
    else:
        if not hasattr(torch, "npu"):
            host_npu.enable()
        if options.run:
            torch.npu.set_compile_mode(jit_compile=False)
            library, calls, name, by = options.run
            run_counted(cases()[name][by], torch.npu.synchronize, library, calls)
        else:
            main(options.rounds)
