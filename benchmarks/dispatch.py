"""Host time of a call on an NPU against torch_npu's own binding: ``python -m benchmarks.dispatch``.

Both sides call the same operator of the same CANN, so what differs is the way there. Without an NPU the host NPU stands
in for it, and its share is the same on both sides. Shapes are small, so that the device does not limit the calls.
"""

import argparse
import os
import time
from functools import partial
from types import SimpleNamespace

import torch_aclnn_ops
from torch_aclnn_ops import _extension

import torch

from benchmarks._harness import Call, compare, interleaved, parser, repeated, run, use_npu
from benchmarks._results import Row

OPERATORS = [name for name in torch_aclnn_ops.ops.__all__ if hasattr(torch.ops.aten, name)]
# torch_npu's binding first; the last is what the package's own autograd functions call.
ENTRIES = ("torch.ops.aten", "torch.ops.torch_aclnn_ops", "torch_aclnn_ops.ops", "extension")
CALLS = 200  # between two waits for the device: fewer than the queue has places


def cases() -> dict[str, dict[str, Call]]:
    """Return a call of each operator, by each of its entries."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.rand(32, 16, generator=generator).npu() for _ in range(2))
    # By the names of arguments in schemas; the gradient of a loss is that of a mean.
    table = {"grad_output": one, "self": one, "num_weights": 20, "padding_idx": -1, "scale_grad_by_freq": False}
    table["indices"] = torch.randint(20, (32,), generator=generator).npu()
    loss = {**table, "grad_output": torch.ones(()).npu(), "target": two, "weight": None, "reduction": 1}
    calls = {}
    for name in OPERATORS:
        schema = getattr(torch.ops.torch_aclnn_ops, name).default._schema.arguments
        values = loss if "reduction" in [argument.name for argument in schema] else table
        arguments = [values.get(argument.name, 1.0) for argument in schema]
        calls[name] = {by: partial(getattr(it, name), *arguments) for by, it in _namespaces().items()}
    return calls


def _namespaces() -> dict[str, object]:
    extension = SimpleNamespace(**_extension.entries)
    everything = (torch.ops.aten, torch.ops.torch_aclnn_ops, torch_aclnn_ops.ops, extension)
    return dict(zip(ENTRIES, everything, strict=True))


def separate_threads() -> None:
    """Give the calling thread a processor, and the queue's and the device's threads the others.

    Where there are only two, the scheduler otherwise lets the queue's thread interrupt the caller that has woken it.
    """
    processors = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task") if len(processors) > 1 else ():
        own = int(thread) == os.getpid()
        os.sched_setaffinity(int(thread), processors[:1] if own else processors[1:])


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare the entries of every operator: the clock's time, and that of the calling thread's processor."""
    use_npu()
    rows = []
    calls = cases()  # after which the queue's thread runs
    separate_threads()
    columns = {"configuration": "512 elements", "device": "npu", "dtype": "float32"}
    for name, entries in calls.items():
        wait = torch.npu.synchronize
        wall = compare(entries, options.rounds, before=wait, calls=CALLS, operator=name, **columns)
        rounds = {by: repeated(call, CALLS) for by, call in entries.items()}
        thread = interleaved(rounds, options.rounds, is_warm=True, before=wait, clock=time.thread_time)
        seconds = [timing.minimum / CALLS for timing in thread.values()]
        rows += [
            {**row, "thread_minimum_s": one, "thread_ratio": f"{one / seconds[0]:.2f}"}
            for row, one in zip(wall, seconds, strict=True)
        ]
    return rows


if __name__ == "__main__":
    parser = parser(__doc__)
    parser.set_defaults(threads=1)
    run("dispatch", measure, parser.parse_args(), rounds=100)
