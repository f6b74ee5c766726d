"""Train for 20,000 steps and see whether anything grows: ``python -m benchmarks.soak [--device npu]``.

A step calls every loss, the embedding and the optimizer, with shapes and dtypes that take turns; now and then the
averages are swapped in and the state is saved and loaded. Counted are the process's memory, tensors, threads and open
files, and on the host NPU, which stands in where there is no NPU, what is alive there and its memory. Time is the
processor's, which other work on the machine does not change much. The command fails if anything but time has grown.
"""

import argparse
import gc
import io
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn
from torch_aclnn_ops.optim import FusedEmaAdam

import host_npu
import torch
from torch import Tensor

from benchmarks._harness import report_cells, status_bytes, use_npu
from benchmarks._results import print_table

SHAPES = tuple(itertools.product((5, 33, 64), (torch.float32, torch.bfloat16)))
_CLASSES = 256
_FEATURES = 32
_EVALUATE_EVERY = 50
_SAVE_EVERY = 500
_SAMPLES = 50
# The allocators of Python and of the C library keep some of what small objects have fragmented.
GROWTH_OF_MEMORY = 0.01


@dataclass(frozen=True)
class Sample:
    """What was found after some steps.

    Attributes:
        step: How many steps were done.
        seconds: Time of the processor for a step since the last sample.
        resident: Bytes of the process's memory.
        counts: What must not grow, by what it is.
    """

    step: int
    seconds: float
    resident: int
    counts: dict[str, int]


class Training:
    """A small model that is trained on random numbers."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.model = torch.nn.ModuleDict(
            {
                "embedding": nn.Embedding(_CLASSES, _FEATURES),
                "hidden": torch.nn.Linear(_FEATURES, _FEATURES),
                "value": torch.nn.Linear(_FEATURES, 2),
                "head": torch.nn.Linear(_FEATURES, _CLASSES, bias=False),
            }
        ).to(device)
        self.optimizer = FusedEmaAdam(self.model.parameters(), lr=1e-3)

    def loss(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Return a loss that every operator has a part in."""
        tokens = torch.randint(_CLASSES, (rows + 1,), generator=self.generator).to(self.device)
        hidden = self.model["hidden"](self.model["embedding"](tokens[:-1])).tanh()
        value, probability = self.model["value"](hidden).sigmoid().unbind(1)
        head = self.model["head"].weight
        return (
            F.linear_cross_entropy(hidden.to(dtype), head.to(dtype), tokens[1:])
            + F.mse_loss(value, tokens[1:] / _CLASSES)
            + F.binary_cross_entropy(probability, (tokens[1:] % 2).float())
        )

    def step(self, number: int) -> None:
        """Do a step, and what comes after so many of them."""
        self.optimizer.zero_grad()
        self.loss(*SHAPES[number % len(SHAPES)]).backward()
        self.optimizer.step()
        if number % _EVALUATE_EVERY == 0:
            with torch.no_grad(), self.optimizer.swap_ema_params():
                self.loss(*SHAPES[0]).item()
        if number % _SAVE_EVERY == 0:
            file = io.BytesIO()
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.seek(0)
            contents = torch.load(file)
            self.model.load_state_dict(contents["model"])
            self.optimizer.load_state_dict(contents["optimizer"])


def soak(device: str, steps: int, samples: int) -> Iterator[Sample]:
    """Train, and yield what was found at regular steps; the first sample is the one after the first of them."""
    training = Training(device)
    every = steps // samples
    started = time.process_time()
    for number in range(1, every * samples + 1):
        training.step(number)
        if number % every == 0:
            _wait(device)
            seconds = (time.process_time() - started) / every
            gc.collect()
            yield Sample(number, seconds, status_bytes("VmRSS"), counts())
            started = time.process_time()


def counts() -> dict[str, int]:
    """Return how many things there are that a process can lose sight of."""
    found = {
        "tensors": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
    }
    if host_npu.is_enabled():
        stats = host_npu.stats()
        found |= stats.alive
        found["bytes on the device"] = sum(stats.device_bytes.values())
    return found


def growth(samples: Sequence[Sample]) -> dict[str, int]:
    """Return what is more at the end than at the end of the first third, and by how much."""
    first, last = samples[len(samples) // 3 - 1].counts, samples[-1].counts
    return {name: last[name] - first.get(name, 0) for name in last if last[name] > first.get(name, 0)}


def _wait(device: str) -> None:
    if device == "npu":
        torch.npu.synchronize()


def _table(samples: Sequence[Sample]) -> list[dict[str, str]]:
    size = len(samples) // 3
    rows = []
    for third in (samples[:size], samples[size:-size], samples[-size:]):
        rows.append(
            {
                "steps": f"to {third[-1].step}",
                "ms of the processor a step": f"{1e3 * statistics.median(sample.seconds for sample in third):.3f}",
                "resident MB": f"{third[-1].resident / 1e6:.1f}",
                **{name: str(count) for name, count in third[-1].counts.items()},
            }
        )
    return rows


def main(device: str, steps: int) -> int:
    """Print a table of the thirds, and what has grown; return the exit status."""
    samples = []
    for sample in soak(device, steps, _SAMPLES):
        report_cells({"steps": f"{sample.step} of {steps}", "resident MB": f"{sample.resident / 1e6:.1f}"})
        samples.append(sample)
    print_table(_table(samples))
    grown = [f"{name} by {more}" for name, more in growth(samples).items()]
    first, last = samples[len(samples) // 3 - 1].resident, samples[-1].resident
    if last > (1 + GROWTH_OF_MEMORY) * first:
        grown.append(f"memory by {(last - first) / 1e6:.1f} MB")
    print(f"grown since the first third: {', '.join(grown) or 'nothing'}")
    return 1 if grown else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    use_npu(options.device)
    sys.exit(main(options.device, options.steps))
