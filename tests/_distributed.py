"""Functions that several processes run together, each with a CPU or an NPU, for tests.

Processes are forked from a server, ``python -m tests._distributed``, which has imported torch once and used no device.
"""

import atexit
import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from torch_aclnn_ops import _torch_npu

import pytest
import torch
import torch._dynamo  # FSDP2 imports it, which takes longer than most cases: here it is done once for all processes
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).parents[1]
BACKENDS = {"cpu": "gloo", "npu": "hccl"}
_HAS_NPU = _torch_npu.why_unavailable() is None
_HAS_HOST_NPU = _torch_npu.is_installed() and any(ROOT.glob("torch_aclnn_ops/_host_npu/libascendcl.so"))
# On which devices a table of cases runs.
DEVICES = ("cpu", "npu") if _HAS_NPU or _HAS_HOST_NPU else ("cpu",)


def groups(*world_sizes: int, often: Iterable[tuple[str, int]]) -> list[Any]:
    """Return pairs of device and world size to run a table with; those that are not in ``often`` are exhaustive."""
    pairs = [(device, world_size) for device in DEVICES for world_size in world_sizes]
    return [pytest.param(pair, marks=[] if pair in often else [pytest.mark.exhaustive]) for pair in pairs]


@dataclass(frozen=True)
class Outcome:
    """What became of a process.

    Attributes:
        value: What its function returned.
        error: What its function raised, with the traceback; ``None`` if it returned.
        exit_status: 0 if it returned, 1 if it raised; minus the signal that ended the process.
        output: What the process has written to its standard output and error.
    """

    value: Any
    error: str | None
    exit_status: int
    output: str


@dataclass(frozen=True)
class _Request:
    folder: Path
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    device: str
    backend: str | None
    environment: dict[str, str]
    timeout: float


def run(function: Callable[..., Any], world_size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Return what ``function(device, *arguments)`` returns in each of so many processes; options are of ``outcomes``.

    Raises:
        AssertionError: A process has raised, or was ended; with its traceback and output.
    """
    found = outcomes(function, world_size, *arguments, **options)
    for rank, outcome in enumerate(found):
        assert outcome.exit_status == 0, f"rank {rank}: {outcome.error}\n{outcome.output}"
    return [outcome.value for outcome in found]


def outcomes(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    device: str = "cpu",
    devices: int = 1,
    backend: str | None = None,
    environment: dict[str, str] | None = None,
    timeout: float = 300,
) -> list[Outcome]:
    """Call ``function(device, *arguments)`` in so many processes, and return what became of them, by rank.

    The processes are the group ``dist.group.WORLD``. What they return has its tensors on the CPU.

    Args:
        function: A function that can be pickled, as its arguments and its result.
        world_size: Number of processes.
        *arguments: The same for every process.
        device: ``"cpu"`` or ``"npu"``, where rank r uses the device r modulo ``devices``.
        devices: How many NPUs there are, if they are simulated.
        backend: The group's; gloo for CPUs and hccl for NPUs unless it is given, and without a group if it is empty.
        environment: Variables that the processes set before they make the group.
        timeout: Seconds after which processes are killed; the group's own timeout is a third of it.
    """
    server = _server(device, devices)
    with tempfile.TemporaryDirectory() as folder:
        backend = BACKENDS[device] if backend is None else backend
        request = _Request(Path(folder), function, arguments, world_size, device, backend, environment or {}, timeout)
        pickle.dump(request, server.stdin)
        server.stdin.flush()
        statuses = pickle.load(server.stdout)
        return [_outcome(Path(folder), rank, status) for rank, status in enumerate(statuses)]


def results_of(cases: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    """Return what each case of a table returns, or the sentence of its error, in a process of a group."""
    results: dict[str, Any] = {}
    for name, case in cases:
        try:
            results[name] = _on_cpu(case())
        except Exception as error:  # told by the test of the case
            results[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return results


def _on_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


@cache
def _server(device: str, devices: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if device == "npu" and (not _HAS_NPU or "TORCH_ACLNN_HOST_NPU_ENABLE" in environment):
        environment |= {"TORCH_ACLNN_HOST_NPU_ENABLE": "1", "TORCH_ACLNN_HOST_NPU_DEVICES": str(devices)}
    elif device == "cpu":
        environment.pop("TORCH_ACLNN_HOST_NPU_ENABLE", None)
    command = [sys.executable, "-m", "tests._distributed"]
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.stdin.close()
    server.wait()


def _outcome(folder: Path, rank: int, exit_status: int) -> Outcome:
    value, error = None, None
    if exit_status in (0, 1):
        value, error = pickle.loads(Path(folder, f"{rank}.result").read_bytes())
    output = Path(folder, f"{rank}.output")
    return Outcome(value, error, exit_status, output.read_text(errors="replace") if output.exists() else "")


def main() -> None:
    """Fork processes as the standard input asks, and answer with their exit statuses."""
    torch.set_num_threads(1)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        gc.freeze()  # what processes share is not copied for the collector's marks
        children = []
        for rank in range(request.world_size):
            if (child := os.fork()) == 0:
                os._exit(_be(rank, request))
            children.append(child)
        pickle.dump(_exit_statuses(children, time.monotonic() + request.timeout), answers)
        answers.flush()


def _exit_statuses(children: list[int], deadline: float) -> list[int]:
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses and (ended := os.waitpid(child, os.WNOHANG))[0]:
                statuses[child] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() > deadline:
            for child in set(children) - set(statuses):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[child] for child in children]


def _be(rank: int, request: _Request) -> int:
    """Be a process of a request, and return its exit status."""
    with Path(request.folder, f"{rank}.output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(request.environment)
    value, error = None, None
    try:
        with _group(rank, request):
            value = _on_cpu(request.function(request.device, *request.arguments))
            gc.collect()  # a model that is alive keeps the group's threads
    except BaseException:
        error = traceback.format_exc()
    Path(request.folder, f"{rank}.result").write_bytes(pickle.dumps((value, error)))
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if error is None else 1


@contextlib.contextmanager
def _group(rank: int, request: _Request) -> Any:
    if request.device == "npu":
        torch.npu.set_device(rank % torch.npu.device_count())
    if not request.backend:
        yield
        return
    dist.init_process_group(
        request.backend,
        store=dist.FileStore(str(request.folder / "store"), request.world_size),
        rank=rank,
        world_size=request.world_size,
        timeout=timedelta(seconds=request.timeout / 3),
    )
    yield
    dist.destroy_process_group()


if __name__ == "__main__":
    from tests import _distributed

    _distributed.main()
