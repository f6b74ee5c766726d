"""Run a function in several processes, each with a CPU or an NPU and all in one process group, for tests.

Processes are forked from a server that has imported torch once and used no device, so a test starts them in
milliseconds.
"""

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_npu import _torch_npu, is_enabled
from host_npu._process_server import End, Request, on_cpu

__all__ = ["Outcome", "outcomes", "results_of", "run"]


def __dir__() -> list[str]:
    return __all__


_BACKENDS = {"cpu": "gloo", "npu": "hccl"}
_MOST_DEVICES = 64


@dataclass(frozen=True)
class Outcome:
    """The outcome of a process.

    Attributes:
        value: The return value of its function.
        error: The traceback if its function raised, or how the process ended otherwise; ``None`` if it returned.
        exit_status: 0 if it returned, 1 if it raised; otherwise that of the process, or minus the signal that ended it.
        output: The process's standard output and error.
        time: The time at which its function returned or raised, or else its end, on the clock of ``time.monotonic()``.
    """

    value: Any
    error: str | None
    exit_status: int
    output: str
    time: float


def run(function: Callable[..., Any], world_size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Return the results of ``function(device, *arguments)`` in several processes.

    Args:
        function: A function that can be pickled, as can its arguments and its result.
        world_size: Number of processes.
        *arguments: Arguments, the same for every process.
        **options: Options of :func:`outcomes`.

    Returns:
        The results by rank, with their tensors on the CPU.

    Raises:
        AssertionError: A process raised or was killed. The message has the traceback and the output of every such
            process, and begins with the one that failed first.
        RuntimeError: The processes could not be started; standard error has the reason.
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value.

    Example:
        >>> run(str.upper, 2, backend="")  # without a process group; the argument is the device
        ['CPU', 'CPU']
    """
    found = outcomes(function, world_size, *arguments, **options)
    failed = sorted((outcome.time, rank) for rank, outcome in enumerate(found) if outcome.error is not None)
    reports = [f"rank {rank}: {found[rank].error}\n{found[rank].output}" for _, rank in failed]
    assert not reports, "\n".join(reports)
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
    grace: float = 5,
) -> list[Outcome]:
    """Call ``function(device, *arguments)`` in several processes, and return their outcomes by rank.

    The processes are the group ``torch.distributed.group.WORLD``.

    Args:
        function: A function that can be pickled, as can its arguments and its result.
        world_size: Number of processes.
        *arguments: Arguments, the same for every process.
        device: ``"cpu"`` or ``"npu"``, where rank r uses the device r modulo ``devices``; NPUs are simulated unless the
            machine has CANN and the host NPU is not enabled.
        devices: Number of simulated NPUs.
        backend: Backend of the group; by default gloo for CPUs and hccl for NPUs. An empty string creates no group.
        environment: Environment variables that the processes set before they create the group.
        timeout: Seconds after which processes are killed; the group's own timeout is a third of it.
        grace: Seconds after which the other processes are killed once one has raised or ended with an error.

    Returns:
        The outcomes by rank; tensors of results are on the CPU.

    Raises:
        RuntimeError: The processes could not be started; standard error has the reason.
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value, or ``function`` is defined in the program itself, which other
            processes cannot import.

    Example:
        >>> [outcome.exit_status for outcome in outcomes(str.upper, 2, backend="")]
        [0, 0]
    """
    if device not in _BACKENDS:
        raise ValueError(f"device must be 'cpu' or 'npu', got {device!r}")
    _check_whole_number("world_size", world_size, sys.maxsize)
    _check_whole_number("devices", devices, _MOST_DEVICES)
    if not (backend is None or isinstance(backend, str)):
        raise TypeError(f"backend must be a string or None, got {backend!r}")
    environment = environment or {}
    if not all(isinstance(text, str) for variable in environment.items() for text in variable):
        raise TypeError(f"environment must have strings as names and values, got {environment!r}")
    for name, value in {"timeout": timeout, "grace": grace}.items():
        if not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r}")
    if getattr(function, "__module__", None) == "__main__":
        raise ValueError(
            "function must be defined in a module that other processes can import, but it is defined in the program"
        )
    backend = _BACKENDS[device] if backend is None else backend
    with tempfile.TemporaryDirectory() as folder:
        request = Request(Path(folder), function, arguments, world_size, device, backend, environment, timeout, grace)
        try:
            pickled = pickle.dumps(request)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"function must be defined at the top level of a module, and its arguments must be picklable: {error}"
            ) from error
        ends = _answer(pickled, device, devices)
        return [_outcome(Path(folder), rank, end) for rank, end in enumerate(ends)]


def _check_whole_number(name: str, value: Any, most: int) -> None:
    expected = f"{name} must be a whole number " + ("of at least 1" if most == sys.maxsize else f"from 1 to {most}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{expected}, got {value!r}")
    if not 1 <= value <= most:
        raise ValueError(f"{expected}, got {value}")


def results_of(cases: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    """Return the result of each case of a table, or its error as a string; called in every process of a group.

    Args:
        cases: Pairs of a name and a function. After each case, the processes wait for one another.

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
            results[name] = on_cpu(case())
        except Exception as error:  # reported by the test of the case
            results[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return results


_server: "subprocess.Popen[bytes] | None" = None


def _answer(request: bytes, device: str, devices: int) -> list[End]:
    """Return the ends of the processes of a request."""
    global _server
    npus: str | int = "none"
    if device == "npu":
        npus = devices if is_enabled() or _torch_npu.real_cann() is None else "real"
    server, _server = _server or _started_server(), None
    assert server.stdin is not None and server.stdout is not None
    try:
        pickle.dump((npus, request), server.stdin)
        server.stdin.flush()
        answer = pickle.load(server.stdout)
    except (EOFError, BrokenPipeError):
        raise RuntimeError(
            f"the process that starts the others has ended with exit status {server.wait()}, see its standard error"
        ) from None
    except BaseException:
        server.terminate()  # and its processes, so that the next request does not get this one's answer
        raise
    _server = server
    if isinstance(answer, str):
        raise RuntimeError(f"the processes cannot import the function or its arguments:\n{answer}")
    ends: list[End] = answer
    return ends


def _started_server() -> "subprocess.Popen[bytes]":
    # Processes use the caller's sys.path, because functions are pickled by name.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("HOST_NPU_ENABLE", None)
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, "-m", "host_npu._process_server"]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[bytes]") -> None:
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        server.stdin.close()
    server.wait()


def _outcome(folder: Path, rank: int, end: End) -> Outcome:
    output = folder / f"{rank}.output"
    text = output.read_text(errors="replace") if output.exists() else ""
    result = folder / f"{rank}.result"
    if end.status in (0, 1) and result.exists():
        value, error, time = pickle.loads(result.read_bytes())
        return Outcome(value, error, end.status, text, time)
    error = end.reason or f"ended with {_described(end.status)} before its function returned"
    return Outcome(None, error, end.status, text, end.time)


def _described(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
