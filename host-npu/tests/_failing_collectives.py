"""Programs of two ranks whose collectives fail, for test_collectives.py, which states each rank's message."""

import os
import signal

import host_npu
import torch
import torch.distributed as dist


def _start(device):
    """Return a tensor and this process's rank, once both ranks have communicated."""
    tensor = torch.ones(8, device=device)
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    return tensor, dist.get_rank()


def _finish():
    torch.npu.synchronize()
    return "no error"


def other_function(device):
    tensor, rank = _start(device)
    dist.all_reduce(tensor) if rank == 0 else dist.broadcast(tensor, 0)
    return _finish()


def other_count(device):
    tensor, rank = _start(device)
    dist.all_reduce(tensor[: 8 - rank])
    return _finish()


def other_dtype(device):
    tensor, rank = _start(device)
    dist.all_reduce(tensor if rank == 0 else tensor.half())
    return _finish()


def other_operation(device):
    tensor, rank = _start(device)
    dist.all_reduce(tensor, dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)
    return _finish()


def product_of_bfloat16(device):
    tensor, _ = _start(device)
    dist.all_reduce(tensor.bfloat16(), dist.ReduceOp.PRODUCT)
    return _finish()


def other_root(device):
    tensor, rank = _start(device)
    dist.broadcast(tensor, rank)
    return _finish()


def other_splits(device):
    tensor, rank = _start(device)
    splits = [4, 4] if rank == 0 else [3, 5]
    dist.all_to_all_single(torch.empty_like(tensor), tensor, [4, 4], splits)
    return _finish()


def shorter_message(device):
    tensor, rank = _start(device)
    dist.send(tensor[:5], 1) if rank == 0 else dist.recv(tensor, 0)
    return _finish()


def _failed(device):
    """Return a tensor of a collective that failed to reduce it."""
    tensor, rank = _start(device)
    dist.all_reduce(tensor[: 8 - rank], async_op=True).wait()
    return tensor


def reads_a_number(device):
    return _failed(device)[0].item()


def copies_to_pinned_memory(device):
    target = torch.empty(8, pin_memory=True)
    target.copy_(_failed(device), non_blocking=True)
    torch.npu.current_stream().synchronize()
    return target


def reads_what_another_stream_made_of_it(device):
    tensor = _failed(device)
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        copy = tensor.clone()
        return copy.cpu()


def makes_a_ddp_model_alone(device):
    tensor, rank = _start(device)
    if rank == 0:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, device=device))
    else:
        dist.broadcast(tensor, 0)
    return _finish()


def never_calls(device):
    # The limit also holds in the first call, which no rank begins before the other one can.
    beside = _group_beside(device)
    tensor, rank = _start(device)
    return _is_awaited(rank, beside, lambda: dist.all_reduce(tensor))


def never_makes_the_communicator(device):
    beside = _group_beside(device)
    return _is_awaited(dist.get_rank(), beside, lambda: dist.all_reduce(torch.ones(8, device=device)))


def is_late(device):
    _group_beside(device)
    tensor, rank = _start(device)
    if rank == 1:
        signal.pause()  # until the watchdog ends this process
    dist.all_reduce(tensor)
    return _finish()


def _group_beside(device):
    """Return a gloo group, which both ranks create once they have a device."""
    torch.ones(1, device=device)
    return dist.new_group(backend="gloo")


def _is_awaited(rank, beside, call):
    """Call a collective on rank 0 only; rank 1 ends once rank 0 has its error."""
    if rank == 1:
        dist.barrier(group=beside)
        raise SystemExit("late")
    try:
        call()
        return _finish()
    finally:
        dist.barrier(group=beside)


def is_killed(device):
    tensor, rank = _start(device)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)
    return _finish()


def leaves(device):
    tensor, rank = _start(device)
    if rank == 1:
        dist.destroy_process_group()
        raise SystemExit("left")
    dist.all_reduce(tensor)
    return _finish()


def fails_as_asked(device):
    tensor, rank = _start(device)
    if rank == 1:
        host_npu.fail("HcclAllReduce")
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    # torch_npu's watchdog may have consumed the only exception.
    torch.nn.functional.mse_loss(tensor, tensor)
    return _finish()


def makes_groups(device):
    """Return the open objects after forty groups were used and left, and after forty more; torch_npu has 32 streams."""
    found = []
    for number in range(80):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(8, device=device), group=group)
        torch.npu.synchronize()
        dist.destroy_process_group(group)
        if number in (39, 79):
            found.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
            found[-1].append(sum("hccl" in line for line in open("/proc/self/maps")))
    return found
