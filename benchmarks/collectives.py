"""Collectives of the host NPU against gloo's on CPU tensors.

Two processes are one group of each kind, and these take turns, so that both meet the same machine. A time is from the
call until the result can be read. It says nothing about devices, but how quick tests are.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import host_npu
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks._harness import MEASURED, Timing, parser, report, run
from benchmarks._results import Row

KINDS = ("gloo", "hccl")
WORLD_SIZE = 2
# Bytes of each rank's input tensor.
SIZES = tuple(1024 * 4**power for power in range(8))
QUICK_SIZES = SIZES[:3]


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
    """Return the mean time of a call, including the wait for its result."""
    start = time.perf_counter()
    for _ in range(count):
        call()
        torch.npu.synchronize()
    return (time.perf_counter() - start) / count


def measure(
    rank: int,
    store: str,
    names: list[str],
    sizes: tuple[int, ...],
    rounds: int,
    results: "multiprocessing.SimpleQueue[list[Row]]",
) -> None:
    """Be one of the processes; rank 0 puts the rows of each collective and size into the queue."""
    torch.set_num_threads(1)
    torch.npu.set_device(rank % torch.npu.device_count())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    groups = {"gloo": dist.group.WORLD, "hccl": dist.new_group(backend="hccl")}
    measured_rows: list[Row] = []
    for size in sizes:
        tensor = torch.rand(size // 4)
        by_kind = {"gloo": calls(tensor, groups["gloo"]), "hccl": calls(tensor.npu(), groups["hccl"])}
        for name in names:
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(rounds + 1):
                for kind in KINDS:
                    dist.barrier(groups["gloo"])
                    took = seconds(by_kind[kind][name], max(1, 2**18 // size))
                    if turn > 0:  # the first one warms up
                        found[kind].append(took)
            made = rows_of(name, size, found, rounds)
            for row in made if rank == 0 else ():
                report(row)
            measured_rows += made
    if rank == 0:
        results.put(sorted(measured_rows, key=lambda row: names.index(str(row["operator"]))))
    dist.barrier(groups["gloo"])
    dist.destroy_process_group()


def rows_of(name: str, size: int, found: dict[str, list[float]], rounds: int) -> list[Row]:
    """Return a row of each kind of a collective."""
    timings = {kind: Timing(tuple(found[kind])) for kind in KINDS}
    gloo = timings["gloo"]
    return [
        {
            "operator": name,
            "configuration": f"{size // 1024:,} KiB, {WORLD_SIZE} ranks",
            "device": "npu" if kind == "hccl" else "cpu",
            "dtype": "float32",
            "by": kind,
            "status": MEASURED,
            "rounds": rounds,
            "median_s": timing.median,
            "minimum_s": timing.minimum,
            "ratio_of_medians": timing.median / gloo.median,
            "ratio_of_minima": timing.minimum / gloo.minimum,
        }
        for kind, timing in timings.items()
    ]


def measured(options: argparse.Namespace) -> list[Row]:
    """Measure in processes of their own."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        sizes = QUICK_SIZES if options.quick else SIZES
        given = (f"{folder}/store", options.only, sizes, options.rounds, results)
        processes = multiprocessing.spawn(measure, given, nprocs=WORLD_SIZE, join=False)
        rows = results.get()
        while not processes.join():
            pass
    return rows


if __name__ == "__main__":
    parser = parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--only", nargs="+", default=["all_reduce"], help="collectives (default: %(default)s)")
    if not hasattr(torch, "npu"):
        host_npu.enable()  # the processes that are started have it too
    run("collectives", measured, parser.parse_args(), rounds=40)
