"""Collectives of two ranks whose tensors are in the format FRACTAL_NZ: those that torch_npu converts."""

from typing import Any

import torch
import torch.distributed as dist

NZ = 29
_SHAPE = (4, 3)


def _tiled(tensor):
    import torch_npu

    tiled = torch_npu.npu_format_cast(tensor.npu(), NZ)
    assert torch_npu.get_npu_format(tiled) == NZ
    return tiled


def _own(rank):
    return torch.arange(12.0).view(_SHAPE) + 100 * rank


def _both(function):
    return function(_own(0), _own(1))


def all_reduce(rank, place):
    tensor = place(_own(rank))
    dist.all_reduce(tensor)
    return tensor, _both(torch.add)


def reduce(rank, place):
    tensor = place(_own(rank))
    dist.reduce(tensor, 0)
    return tensor, _both(torch.add) if rank == 0 else None


def broadcast(rank, place):
    tensor = place(_own(rank))
    dist.broadcast(tensor, 1)
    return tensor, _own(1)


def all_to_all(rank, place):
    tensors = [place(torch.zeros(each + 1, 3)) for each in range(2)]
    dist.all_to_all(tensors, [place(_own(rank)[: rank + 1]) for _ in range(2)])
    return tensors, [_own(0)[:1], _own(1)[:2]]


def all_to_all_single(rank, place):
    tensor = place(torch.zeros(_SHAPE))
    dist.all_to_all_single(tensor, place(_own(rank)))
    return tensor, torch.cat([_own(each).chunk(2)[rank] for each in range(2)])


def send_and_receive(rank, place):
    tensor = place(_own(rank))
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    return tensor, _own(0)


CASES = (all_reduce, reduce, broadcast, all_to_all, all_to_all_single, send_and_receive)


def wrong(device: str) -> dict[str, Any]:
    """Return the collectives whose results are not as they should be, with what was found."""
    torch.npu.config.allow_internal_format = True
    found = {case.__name__: case(dist.get_rank(), _tiled) for case in CASES}
    return {name: actual for name, (actual, expected) in found.items() if not _equal(actual, expected)}


def _equal(actual, expected):
    if isinstance(expected, list):
        return all(map(_equal, actual, expected))
    return expected is None or torch.equal(actual.cpu(), expected)
