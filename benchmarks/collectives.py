"""Collectives of the host NPU against gloo's on CPU tensors.

``python -m torch_aclnn_ops.host_npu -m benchmarks.collectives``: two processes are one group of each kind, and these
take turns, so that both meet the same machine. A time is from the call until the result can be read. It says nothing
about devices, but how quick tests are.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch_aclnn_ops

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks._harness import print_table

assert torch_aclnn_ops.__version__

KINDS = ("gloo", "hccl")
WORLD_SIZE = 2
# Bytes of the tensor that a rank gives.
SIZES = tuple(1024 * 4**power for power in range(8))
# At most so many times the time of gloo, for the first and the last size.
BAR = 1.5


def calls(tensor: Tensor, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Return a call of each collective that is measured."""
    gathered = tensor.new_empty(WORLD_SIZE * len(tensor))
    return {
        "all_reduce": partial(dist.all_reduce, tensor, group=group),
        "broadcast": partial(dist.broadcast, tensor, 0, group=group),
        "all_gather_into_tensor": partial(dist.all_gather_into_tensor, gathered, tensor, group=group),
        "all_to_all_single": partial(dist.all_to_all_single, torch.empty_like(tensor), tensor, group=group),
    }


def seconds(call: Callable[[], object], count: int) -> float:
    """Return how long one of so many calls takes, with the wait for each result."""
    start = time.perf_counter()
    for _ in range(count):
        call()
        torch.npu.synchronize()
    return (time.perf_counter() - start) / count


def measure(
    rank: int, store: str, names: list[str], rounds: int, results: "multiprocessing.SimpleQueue[object]"
) -> None:
    """Be one of the processes; rank 0 puts the times of each collective and size, by kind, into the queue."""
    torch.set_num_threads(1)
    torch.npu.set_device(rank % torch.npu.device_count())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    groups = {"gloo": dist.group.WORLD, "hccl": dist.new_group(backend="hccl")}
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for size in SIZES:
        tensor = torch.rand(size // 4)
        by_kind = {"gloo": calls(tensor, groups["gloo"]), "hccl": calls(tensor.npu(), groups["hccl"])}
        for name in names:
            found = times.setdefault((name, size), {kind: [] for kind in KINDS})
            for turn in range(rounds + 1):
                for kind in KINDS:
                    dist.barrier(groups["gloo"])
                    took = seconds(by_kind[kind][name], max(1, 2**18 // size))
                    if turn > 0:  # the first one warms up
                        found[kind].append(took)
    if rank == 0:
        results.put(times)
    dist.barrier(groups["gloo"])
    dist.destroy_process_group()


def rows(times: dict[tuple[str, int], dict[str, list[float]]]) -> list[dict[str, str]]:
    """Return the lines of the table: microseconds, bytes a second and the ratio of the shortest times."""
    lines = []
    for (name, size), found in times.items():
        shortest = {kind: min(found[kind]) for kind in KINDS}
        ratios = [hccl / gloo for gloo, hccl in zip(found["gloo"], found["hccl"], strict=True)]
        line = {"collective": name, "KiB": f"{size // 1024:,}"}
        line |= {f"{kind}, us": f"{shortest[kind] * 1e6:,.0f}" for kind in KINDS}
        line |= {f"{kind}, MiB/s": f"{size / shortest[kind] / 2**20:,.0f}" for kind in KINDS}
        line |= {"ratio of the shortest": f"{shortest['hccl'] / shortest['gloo']:.2f}"}
        lines.append(line | {"median ratio": f"{statistics.median(ratios):.2f}"})
    return lines


def main() -> int:
    """Print the table; return 1 if an all-reduce of the first or the last size takes too long."""
    parser = argparse.ArgumentParser(description="Measure collectives of the host NPU and of gloo.")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each kind (default: 40)")
    parser.add_argument("--only", nargs="+", default=["all_reduce"], help="collectives (default: all_reduce)")
    arguments = parser.parse_args()
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", arguments.only, arguments.rounds, results)
        processes = multiprocessing.spawn(measure, given, nprocs=WORLD_SIZE, join=False)
        times = results.get()
        while not processes.join():
            pass
    print_table(rows(times))
    bars = [times["all_reduce", size] for size in (SIZES[0], SIZES[-1]) if ("all_reduce", size) in times]
    return int(any(min(found["hccl"]) > BAR * min(found["gloo"]) for found in bars))


if __name__ == "__main__":
    raise SystemExit(main())
