"""The server of :mod:`host_npu.testing`, which forks the processes of a request and reports how they ended.

It imports torch once. torch_npu reads the number of devices at import, so the server forks itself once for each number
of devices; the fork serves all requests with it.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import host_npu
from host_npu import _inductor


@dataclass(frozen=True)
class Request:
    """A call of a function in several processes."""

    folder: Path
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    device: str
    backend: str | None
    environment: dict[str, str]
    timeout: float
    grace: float


@dataclass(frozen=True)
class End:
    """The end of a process.

    Attributes:
        status: Its exit status.
        time: The time at which it ended or its function raised; the clock is the same in all processes.
        reason: The reason why it was killed; ``None`` if it ended by itself.
    """

    status: int
    time: float
    reason: str | None = None


def on_cpu(value: Any) -> Any:
    """Return a value with its tensors on the CPU."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


def main() -> None:
    """Fork processes for requests on standard input, and reply with their ends."""
    sys.meta_path.insert(0, _inductor.TritonFinder())
    import torch
    import torch._dynamo  # FSDP2's slow import, done once for all processes

    torch.set_num_threads(1)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    forks: dict[str | int, _Fork] = {}
    signal.signal(signal.SIGTERM, lambda *_: _end((fork.process for fork in forks.values()), signal.SIGTERM))
    while True:
        try:
            npus, pickled = pickle.load(requests)
        except EOFError:
            return
        fork = forks.get(npus) or forks.setdefault(npus, _Fork(npus))
        pickle.dump(fork.answer(pickled), answers)
        answers.flush()


class _Fork:
    """A fork of the server.

    Args:
        npus: The number of simulated NPUs, ``"real"`` for the machine's NPUs, or ``"none"``.
    """

    def __init__(self, npus: str | int) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self.process = os.fork()
        if self.process == 0:
            self._pipe.close()
            _serve(npus, other)
        other.close()

    def answer(self, pickled: bytes) -> list[End] | str:
        """Return the result of :func:`_served` in the fork; if the fork has ended, end in the same way."""
        try:
            self._pipe.send_bytes(pickled)
            answer: list[End] | str = self._pipe.recv()
        except (EOFError, OSError):
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]))
        return answer


def _serve(npus: str | int, pipe: Connection) -> NoReturn:
    """Serve the requests of a pipe until it is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        if isinstance(npus, int):
            # The client has already checked for a real CANN.
            host_npu.enable(npus, force=True)
        elif npus == "real":
            os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
            import torch_npu  # type: ignore[import-untyped]  # noqa: F401
        while True:
            pipe.send(_served(pipe.recv_bytes()))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _end(others: Iterable[int], number: signal.Signals) -> NoReturn:
    """Signal the other processes and end this one."""
    for other in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, number)
    os._exit(1)


def _served(pickled: bytes) -> list[End] | str:
    """Run the processes of a request; return their ends, or the reason why the request cannot be read."""
    try:
        request = pickle.loads(pickled)
    except Exception:
        return traceback.format_exc()
    gc.freeze()  # keeps garbage collection from copying shared pages
    children: list[int] = []

    before = signal.signal(signal.SIGTERM, lambda *_: _end(children, signal.SIGKILL))
    for rank in range(request.world_size):
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGTERM, before)
            os._exit(_be(rank, request))
        children.append(child)
    try:
        return _ends(children, request.timeout, request.grace)
    finally:
        signal.signal(signal.SIGTERM, before)


def _ends(children: list[int], timeout: float, grace: float) -> list[End]:
    """Wait for processes; kill those that exceed the timeout, or the grace period after another one has failed."""
    ends: dict[int, End] = {}
    deadline, reason = time.monotonic() + timeout, f"killed after the timeout of {timeout:g} s"
    killed: dict[int, str] = {}
    while len(ends) < len(children):
        for rank, child in enumerate(children):
            if rank in ends or not (ended := os.waitpid(child, os.WNOHANG))[0]:
                continue
            ends[rank] = End(os.waitstatus_to_exitcode(ended[1]), time.monotonic(), killed.get(rank))
            if ends[rank].status != 0 and not killed and time.monotonic() + grace < deadline:
                deadline, reason = time.monotonic() + grace, f"killed {grace:g} s after rank {rank} had failed"
        if time.monotonic() > deadline:
            for rank in set(range(len(children))) - set(ends) - set(killed):
                killed[rank] = reason
                os.kill(children[rank], signal.SIGKILL)
        time.sleep(0.005)
    return [ends[rank] for rank in range(len(children))]


def _be(rank: int, request: Request) -> int:
    """Run one process of a request, and return its exit status."""
    import torch

    with Path(request.folder, f"{rank}.output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # The first thread that sets the number of threads after a fork replaces torch's thread pool; a concurrent second
    # one finds none and aborts ("Invalid thread pool!"). So do it while there is only one thread.
    torch.set_num_threads(torch.get_num_threads())
    os.environ.update(request.environment)
    error = None
    try:
        with _group(rank, request):
            value = on_cpu(request.function(request.device, *request.arguments))
            gc.collect()  # a live model keeps the group's threads running
        result = pickle.dumps((value, None, time.monotonic()))
    except BaseException:
        error = traceback.format_exc()
        result = pickle.dumps((None, error, time.monotonic()))
    Path(request.folder, f"{rank}.result").write_bytes(result)
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if error is None else 1


@contextlib.contextmanager
def _group(rank: int, request: Request) -> Iterator[None]:
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
    from host_npu import _process_server  # pickles its classes under this module's name, not __main__

    _process_server.main()
