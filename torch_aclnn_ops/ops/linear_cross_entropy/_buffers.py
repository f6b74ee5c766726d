"""Memory for logits and their gradients, in large pages where a CPU's system has them.

A new tensor of this size is memory that the system has not mapped yet. It maps and clears it page by page on first use,
which takes longer for 4 KiB pages than all that is computed between two matrix products. Some virtual machines report
free memory to their host, which takes it away when it was free for two seconds; giving back a large page takes the host
longer than giving back the few small ones that were not used for anything else in between.
"""

import functools
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

# Less than this is memory that the allocator has had before.
_FEWEST_BYTES = 2**24
# Linux's parameter: the least power of two of pages that is reported to the host. Where nothing is, it is -1 or,
# before Linux 6.3, more than a block of free pages can have.
_LARGEST_ORDER = 10
_REPORTED_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a tensor that is not initialised, on the device of another, for use within a call.

    Args:
        shape: of the tensor.
        like: a tensor on the device.
        dtype: of the tensor.
    """
    number = math.prod(shape)
    if not _takes_large_pages(like, number * dtype.itemsize):
        return like.new_empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, number * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps the memory


def _takes_large_pages(like: Tensor, number_of_bytes: int) -> bool:
    return (
        like.device.type == "cpu"
        and number_of_bytes >= _FEWEST_BYTES
        and type(like) in (Tensor, torch.nn.Parameter)
        and hasattr(mmap, "MADV_HUGEPAGE")
        and not _host_takes_free_memory()
    )


@functools.cache
def _host_takes_free_memory() -> bool:
    """Return whether this is a virtual machine that reports its free memory to the host."""
    try:
        return 0 <= int(_REPORTED_ORDER.read_text()) <= _LARGEST_ORDER
    except (OSError, ValueError):
        return False
