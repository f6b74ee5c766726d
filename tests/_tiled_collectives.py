"""Collectives of two ranks whose tensors are in the format FRACTAL_NZ, for test_collectives.py."""

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


def all_gather(rank, place):
    tensors = [place(torch.zeros(_SHAPE)) for _ in range(2)]
    dist.all_gather(tensors, place(_own(rank)))
    return tensors, [_own(0), _own(1)]


def all_gather_into_tensor(rank, place):
    tensor = place(torch.zeros(8, 3))
    dist.all_gather_into_tensor(tensor, place(_own(rank)))
    return tensor, torch.cat([_own(0), _own(1)])


def gather(rank, place):
    tensors = [place(torch.zeros(_SHAPE)) for _ in range(2)] if rank == 0 else None
    dist.gather(place(_own(rank)), tensors)
    return tensors, [_own(0), _own(1)] if rank == 0 else None


def scatter(rank, place):
    tensor = place(torch.zeros(_SHAPE))
    dist.scatter(tensor, [place(_own(0)), place(_own(1))] if rank == 0 else None)
    return tensor, _own(rank)


def reduce_scatter(rank, place):
    tensor = place(torch.zeros(_SHAPE))
    dist.reduce_scatter(tensor, [place(_own(rank)), place(-_own(rank))])
    return tensor, _both(torch.add) * (1 if rank == 0 else -1)


def reduce_scatter_tensor(rank, place):
    tensor = place(torch.zeros(2, 3))
    dist.reduce_scatter_tensor(tensor, place(_own(rank)))
    return tensor, _both(torch.add).chunk(2)[rank]


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


CASES = (
    *(all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter),
    *(reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, send_and_receive),
)


def outcome(device: str, case: Any) -> str:
    """Return whether the result of a collective is "right" or "wrong", or the sentence of its error."""
    torch.npu.config.allow_internal_format = True
    try:
        found, expected = case(dist.get_rank(), _tiled)
        found = [tensor.cpu() for tensor in found] if isinstance(found, list) else [found.cpu()] if isinstance(found, torch.Tensor) else None
    except RuntimeError as error:
        return str(error)
    if expected is None:
        return "right"
    expected = expected if isinstance(expected, list) else [expected]
    return "right" if all(map(torch.equal, found, expected)) else f"wrong: {found}"
