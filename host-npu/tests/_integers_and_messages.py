"""Averages of integers, and messages of a rank to itself, for test_collectives.py."""

import torch
import torch.distributed as dist


def averages(device, dtype):
    """Return the averages of two ranks' integers by all_reduce and by reduce_scatter_tensor."""
    rank = dist.get_rank()
    values = [[7, 0, 5, 2], [0, 1, 5, 3]][rank]
    if dtype.is_signed:
        values = [-value for value in values[:2]] + values[2:]
    reduced = torch.tensor(values, dtype=dtype, device=device)
    own = torch.empty(2, dtype=dtype, device=device)
    if dtype != torch.uint8:  # which torch_npu's reduce_scatter refuses
        dist.reduce_scatter_tensor(own, reduced.clone(), dist.ReduceOp.AVG)
    dist.all_reduce(reduced, dist.ReduceOp.AVG)
    return reduced.tolist(), own.tolist()


def division_in_place(device):
    """Return what a program's own division of integers raises."""
    try:
        torch.ones(2, dtype=torch.int32, device=device).div_(2)
    except RuntimeError as error:
        return str(error)
    return None


def messages_to_all(device):
    """Return what a rank has received of every rank, itself among them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.zeros(3, device=device) for _ in range(size)]
    operations = []
    for peer in range(size):
        operations.append(dist.P2POp(dist.irecv, received[peer], peer))
        operations.append(dist.P2POp(dist.isend, torch.full((3,), 10.0 * rank + peer, device=device), peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [each.tolist() for each in received]
