"""Run a function in several processes, each with a CPU or an NPU and all in one process group, for tests.

Processes are forked from a server that has imported torch once and used no device, so that a test takes milliseconds to
start some.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "outcomes", "results_of", "run"]


def __dir__() -> list[str]:
    return __all__


_BACKENDS = {"cpu": "gloo", "npu": "hccl"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a process.

    Attributes:
        value: What its function returned.
        error: The traceback of what its function raised; ``None`` if it returned.
        exit_status: 0 if it returned, 1 if it raised; otherwise that of the process, or minus the signal that ended it.
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
    """Return the results of ``function(device, *arguments)`` in several processes.

    Args:
        function: A function that can be pickled, as its arguments and its result.
        world_size: Number of processes.
        *arguments: The same for every process.
        **options: Those of :func:`outcomes`.

    Returns:
        The results by rank, with their tensors on the CPU.

    Raises:
        AssertionError: A process raised or was killed; with its traceback and output.

    Example:
        >>> run(str.upper, 2, backend="")  # without a process group; the argument is the device
        ['CPU', 'CPU']
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
    """Call ``function(device, *arguments)`` in several processes, and return how each ended, by rank.

    The processes are the group ``torch.distributed.group.WORLD``.

    Args:
        function: A function that can be pickled, as its arguments and its result.
        world_size: Number of processes.
        *arguments: The same for every process.
        device: ``"cpu"`` or ``"npu"``, where rank r uses the device r modulo ``devices``; NPUs are simulated unless the
            machine has CANN and the host NPU is not enabled.
        devices: How many NPUs there are, if they are simulated.
        backend: The group's; gloo for CPUs and hccl for NPUs unless it is given, and no group if it is empty.
        environment: Variables that the processes set before they make the group.
        timeout: Seconds after which processes are killed; the group's own timeout is a third of it.

    Returns:
        How each process ended; tensors of results are on the CPU.

    Raises:
        ValueError: ``device`` is not accepted, or ``function`` is one of the program itself, which other processes
            cannot import.

    Example:
        >>> [outcome.exit_status for outcome in outcomes(str.upper, 2, backend="")]
        [0, 0]
    """
    if device not in _BACKENDS:
        raise ValueError(f"device must be 'cpu' or 'npu', got {device!r}")
    if getattr(function, "__module__", None) == "__main__":
        raise ValueError(
            "function must be defined in a module that other processes can import, but it is defined in the program"
        )
    server = _server(device, devices)
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        backend = _BACKENDS[device] if backend is None else backend
        request = _Request(Path(folder), function, arguments, world_size, device, backend, environment or {}, timeout)
        pickle.dump(request, server.stdin)
        server.stdin.flush()
        statuses = pickle.load(server.stdout)
        return [_outcome(Path(folder), rank, status) for rank, status in enumerate(statuses)]


def results_of(cases: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    """Return the result of each case of a table, or its error as a string; called in every process of a group.

    Args:
        cases: Pairs of a name and a function. After each, the processes wait for one another.

    Returns:
        The results by name, with their tensors on the CPU.

    Example:
        >>> def in_group(device):
        ...     return results_of([("one", lambda: 1), ("error", lambda: 1 / 0)])
        >>> run(in_group, 2)[1]  # doctest: +SKIP
        {'one': 1, 'error': 'ZeroDivisionError: division by zero'}
    """
    import torch.distributed as dist

    results: dict[str, Any] = {}
    for name, case in cases:
        try:
            results[name] = _on_cpu(case())
        except Exception as error:  # reported by the test of the case
            results[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return results


def _on_cpu(value: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


@cache
def _server(device: str, devices: int) -> "subprocess.Popen[bytes]":
    from host_npu import _torch_npu, is_enabled

    # Processes use the caller's sys.path, because functions are pickled by name.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    prefix = ["-m", "host_npu.testing"]
    if device == "npu" and (is_enabled() or _torch_npu.real_cann() is None):
        environment |= {"HOST_NPU_DEVICES": str(devices)}
        prefix = ["-m", "host_npu", *prefix]
    elif device == "cpu":
        environment.pop("HOST_NPU_ENABLE", None)
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    server = subprocess.Popen([sys.executable, *prefix], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[bytes]") -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def _outcome(folder: Path, rank: int, exit_status: int) -> Outcome:
    value, error = None, None
    if exit_status in (0, 1):
        value, error = pickle.loads(Path(folder, f"{rank}.result").read_bytes())
    output = Path(folder, f"{rank}.output")
    return Outcome(value, error, exit_status, output.read_text(errors="replace") if output.exists() else "")


def main() -> None:
    """Fork processes for requests on the standard input, and reply with their exit statuses."""
    import torch
    import torch._dynamo  # FSDP2 imports it, which takes longer than most tests: here it is done once for all processes

    torch.set_num_threads(1)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        gc.freeze()  # so that garbage collection does not copy shared pages
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
    """Run one process of a request, and return its exit status."""
    with Path(request.folder, f"{rank}.output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(request.environment)
    value, error = None, None
    try:
        with _group(rank, request):
            value = _on_cpu(request.function(request.device, *request.arguments))
            gc.collect()  # a live model keeps the group's threads running
    except BaseException:
        error = traceback.format_exc()
    Path(request.folder, f"{rank}.result").write_bytes(pickle.dumps((value, error)))
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if error is None else 1


@contextlib.contextmanager
def _group(rank: int, request: _Request) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    if request.device == "npu":
        torch.npu.set_device(rank % torch.npu.device_count())  # type: ignore[attr-defined]
    if not request.backend:
        yield
        return
    dist.init_process_group(
        request.backend,
        store=dist.FileStore(  # type: ignore[attr-defined]
            str(request.folder / "store"), request.world_size
        ),
        rank=rank,
        world_size=request.world_size,
        timeout=timedelta(seconds=request.timeout / 3),
    )
    yield
    dist.destroy_process_group()


if __name__ == "__main__":
    from host_npu import testing

    testing.main()
