"""The processes started by ``torchrun``, as a group whose devices communicate."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Functions of this module have the current default group as a default argument, and torch.optim imports it in the first
# step. A group that existed by then would live until Python exits, and a thread of it that frees a tensor at that time
# aborts the process.
import torch.distributed.nn
from devices import open_device

BACKENDS = {"cpu": "gloo", "npu": "hccl"}


class NoProcessesError(RuntimeError):
    """Raised when a program was not started by ``torchrun``."""


@contextmanager
def processes(device: str) -> Iterator[None]:
    """Join the processes that torchrun has started, each with such a device, and leave them at the end."""
    if "RANK" not in os.environ:
        raise NoProcessesError("several processes need torchrun: torchrun --nproc-per-node 2 PROGRAM ...")
    open_device(device)
    if device == "npu":
        torch.npu.set_device(int(os.environ["LOCAL_RANK"]) % torch.npu.device_count())
    dist.init_process_group(BACKENDS[device])
    try:
        yield
    finally:
        dist.destroy_process_group()


def first_process_first(make: Callable[[], Any]) -> Any:
    """Return the result of ``make``, which the first process calls before the others, so that they find its files."""
    if dist.get_rank() > 0:
        dist.barrier()
    made = make()
    if dist.get_rank() == 0:
        dist.barrier()
    return made
