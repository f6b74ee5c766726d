"""Train for 20,000 steps and check that nothing grows: ``python -m benchmarks.soak [--device npu]``.

A step calls every loss, the embedding and the optimizer, with varying shapes and dtypes; occasionally the averages are
swapped in, and the state is saved and loaded. The command counts the process's memory, tensors, threads and open files,
and on the host NPU, which is used where there is no NPU, live objects and device memory. It fails if anything has
grown.
"""

import argparse
import gc
import io
import itertools
import os
import sys
from collections.abc import Mapping

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn
from torch_aclnn_ops.optim import FusedEmaAdam

import host_npu
import torch
from torch import Tensor

from benchmarks._harness import report_cells, status_bytes, use_npu

SHAPES = tuple(itertools.product((5, 33, 64), (torch.float32, torch.bfloat16)))
_CLASSES = 256
_FEATURES = 32
_EVALUATE_EVERY = 50
_SAVE_EVERY = 500
_SAMPLES = 50
# The allocators of Python and the C library keep some memory that small objects have fragmented.
MEMORY, GROWTH_OF_MEMORY = "bytes of memory", 0.01


class Training:
    """A small model trained on random numbers."""

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
        """Return a loss to which every operator contributes."""
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
        """Do a step, and the periodic actions after it."""
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


def counts() -> dict[str, int]:
    """Return the numbers of resources that a process can leak."""
    gc.collect()
    found = {
        "tensors": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        MEMORY: status_bytes("VmRSS"),
    }
    if host_npu.is_enabled():
        stats = host_npu.stats()
        found |= stats.alive
        found["bytes on the device"] = sum(stats.device_bytes.values())
    return found


def growth(first: Mapping[str, int], last: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each resource that has grown."""
    allowed = {MEMORY: int(GROWTH_OF_MEMORY * first[MEMORY])}
    more = {name: last[name] - first.get(name, 0) for name in last}
    return {name: number for name, number in more.items() if number > allowed.get(name, 0)}


def main(device: str, steps: int) -> int:
    """Train, print the counts periodically, and the growth since a third of the steps; return the exit status."""
    training = Training(device)
    first, last = None, {}
    for number in range(1, steps + 1):
        training.step(number)
        if number % (steps // _SAMPLES) == 0:
            if device == "npu":
                torch.npu.synchronize()
            last = counts()
            first = last if first is None and number >= steps // 3 else first
            report_cells({"steps": f"{number} of {steps}", **{name: f"{count:,}" for name, count in last.items()}})
    grown = [f"{name} by {more:,}" for name, more in growth(first or last, last).items()]
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
