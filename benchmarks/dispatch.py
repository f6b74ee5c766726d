"""Host time of a call on an NPU against torch_npu's own binding: ``python -m benchmarks.dispatch``.

Both sides call the same operator of the same CANN, so what differs is the way there. Without an NPU the host NPU stands
in for it, and its share is the same on both sides. Shapes are small, so that the device does not limit the calls.

``--instructions`` counts the instructions of the calling thread instead, with valgrind (minutes, and no noise).
"""

import argparse
import ctypes
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch_aclnn_ops import host_npu

import torch

from benchmarks._harness import print_table

CALLS = 200  # between two waits for the device: fewer than the queue has places

_TOGGLE = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_TOGGLE_COLLECT; }
void stop(void) { CALLGRIND_TOGGLE_COLLECT; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def cases() -> dict[str, tuple[Callable[..., object], Callable[..., object], tuple[object, ...]]]:
    """Return torch_npu's operator, ours, and the arguments, by name."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.rand(32, 16, generator=generator).npu() for _ in range(2))
    gradient = torch.ones(()).npu()
    indices = torch.randint(20, (32,), generator=generator).npu()
    theirs, ours = torch.ops.aten, torch.ops.torch_aclnn_ops
    arguments = {
        "mse_loss_backward": (gradient, one, two, 1),
        "binary_cross_entropy_backward": (gradient, one, two, None, 1),
        "embedding_dense_backward": (one, indices, 20, -1, False),
    }
    return {name: (getattr(theirs, name), getattr(ours, name), args) for name, args in arguments.items()}


def time_calls(function: Callable[..., object], arguments: tuple[object, ...]) -> tuple[float, float]:
    """Return the microseconds of a call: as the clock shows them, and of the calling thread's processor alone."""
    torch.npu.synchronize()
    wall, processor = time.perf_counter(), time.thread_time()
    for _ in range(CALLS):
        function(*arguments)
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
    for name, (theirs, ours, arguments) in calls.items():
        times: tuple[list[tuple[float, float]], ...] = ([], [])
        for function in (theirs, ours):
            time_calls(function, arguments)
        for _ in range(rounds):
            for function, measured in zip((theirs, ours), times, strict=True):
                measured.append(time_calls(function, arguments))
        for by, measured in zip(("torch_npu", "torch_aclnn_ops"), times, strict=True):
            row = {"operator": name, "by": by}
            for i, clock in enumerate(("wall", "thread")):
                for what, reduce in (("median", statistics.median), ("minimum", min)):
                    own, reference = (reduce(pair[i] for pair in values) for values in (measured, times[0]))
                    row[f"{clock} {what} us"] = f"{own:.2f}"
                    row[f"{clock} {what} ratio"] = f"{own / reference:.2f}"
            rows.append(row)
    print_table(rows)


def count_instructions(calls: int = 300) -> None:
    """Print a table: instructions of the calling thread in a call, as valgrind counts them."""
    if shutil.which("valgrind") is None:
        sys.exit("benchmarks.dispatch: --instructions needs valgrind and its headers")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        toggle = Path(folder) / "toggle.so"
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(toggle)]
        subprocess.run(compiler, input=_TOGGLE, text=True, check=True)
        for name in ("mse_loss_backward", "binary_cross_entropy_backward", "embedding_dense_backward"):
            counts = [_count(folder, str(toggle), name, by, calls) / calls for by in range(2)]
            for by, count in zip(("torch_npu", "torch_aclnn_ops"), counts, strict=True):
                rows.append(
                    {"operator": name, "by": by, "instructions": f"{count:.0f}", "ratio": f"{count / counts[0]:.2f}"}
                )
    print_table(rows)


def _count(folder: str, toggle: str, name: str, by: int, calls: int) -> int:
    output = Path(folder) / f"{name}.{by}"
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", "--separate-threads=yes"]
    run = [sys.executable, "-m", "benchmarks.dispatch", "--run", toggle, name, str(by), str(calls)]
    subprocess.run([*valgrind, f"--callgrind-out-file={output}", *run], check=True, capture_output=True)
    counted = re.search(r"^totals: (\d+)", Path(f"{output}-01").read_text(), re.MULTILINE)
    assert counted is not None
    return int(counted[1])


def _run(toggle: str, name: str, by: str, calls: str) -> None:
    """Make the counted calls; runs under valgrind."""
    torch.npu.set_compile_mode(jit_compile=False)
    *functions, arguments = cases()[name]
    library, function = ctypes.CDLL(toggle), functions[int(by)]
    for _ in range(10):
        function(*arguments)
    torch.npu.synchronize()
    library.start()
    for _ in range(int(calls)):
        function(*arguments)
    library.stop()
    torch.npu.synchronize()
    os._exit(0)  # to end Python under valgrind takes longer than all of the above


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind")
    parser.add_argument("--rounds", type=int, default=150, help="counted rounds of the clock")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instructions:
        count_instructions()
    else:
        if not hasattr(torch, "npu"):
            host_npu.enable()
        if options.run:
            _run(*options.run)
        else:
            main(options.rounds)
