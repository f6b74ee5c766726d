"""Calls of torch and torch_npu by the functions of HCCL that they reach, for test_hccl.py."""

import ctypes

import host_npu
import torch
import torch.distributed as dist


def _ones(*shape):
    return torch.ones(*shape, device="npu")


def _send_and_recv():
    dist.send(_ones(2), 1) if dist.get_rank() == 0 else dist.recv(_ones(2), 0)


def _batch():
    other = 1 - dist.get_rank()
    steps = [dist.P2POp(dist.isend, _ones(2), other), dist.P2POp(dist.irecv, _ones(2), other)]
    for work in dist.batch_isend_irecv(steps):
        work.wait()


def _backend():
    return dist.group.WORLD._get_backend(torch.device("npu"))


def _group():
    group = dist.new_group([0, 1], backend="hccl")
    dist.all_reduce(_ones(1), group=group)
    torch.npu.synchronize()
    dist.destroy_process_group(group)


def _uneven():
    from torch_npu import distributed

    distributed.reduce_scatter_tensor_uneven(_ones(1 + dist.get_rank()), _ones(3), [1, 2])
    distributed.all_gather_into_tensor_uneven(_ones(3), _ones(1 + dist.get_rank()), [1, 2])
    distributed.all_to_all_vc(_ones(2), _ones(2), [[1, 1], [1, 1]])


CALLS = {
    "a new group, used and left": _group,
    "all_reduce": lambda: dist.all_reduce(_ones(2)),
    "reduce": lambda: dist.reduce(_ones(2), 0),
    "broadcast": lambda: dist.broadcast(_ones(2), 0),
    "all_gather": lambda: dist.all_gather([_ones(2), _ones(2)], _ones(2)),
    "reduce_scatter": lambda: dist.reduce_scatter(_ones(2), [_ones(2), _ones(2)]),
    "scatter": lambda: dist.scatter(_ones(2), [_ones(2), _ones(2)] if dist.get_rank() == 0 else None, 0),
    "all_to_all_single": lambda: dist.all_to_all_single(_ones(2), _ones(2)),
    "all_to_all_single with splits": lambda: dist.all_to_all_single(_ones(2), _ones(2), [1, 1], [1, 1]),
    "torch_npu's uneven functions": _uneven,
    "send and recv": _send_and_recv,
    "batch_isend_irecv": _batch,
    "the backend's batch_isend_irecv": lambda: _backend().batch_isend_irecv(
        ["isend", "irecv"], [_ones(2), _ones(2)], [1 - dist.get_rank()] * 2
    ),
    "get_hccl_comm_name": lambda: _backend().get_hccl_comm_name(torch.npu.current_device()),
    "barrier": dist.barrier,
}


def functions(device):
    """Return which functions of HCCL each call makes, and what it raises."""
    found = {}
    host_npu.count_calls()
    for name, call in CALLS.items():
        before = host_npu.stats().calls
        try:
            call()
            torch.npu.synchronize()
            error = ""
        except RuntimeError as raised:
            error = str(raised)
        made = host_npu.stats().calls
        found[name] = {each for each, count in made.items() if each[:2] == "Hc" and count > before.get(each, 0)}, error
    return found


def answers(device, names):
    """Return the status and the message of functions of HCCL that look at no argument."""
    libraries, runtime = [ctypes.CDLL(name) for name in ("libhccl.so", "libhcomm.so")], ctypes.CDLL("libascendcl.so")
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    found = {}
    for name in names:
        [function] = [getattr(library, name) for library in libraries if hasattr(library, name)][:1]
        found[name] = function(*[ctypes.c_void_p()] * 6), (runtime.aclGetRecentErrMsg() or b"").decode()
    return found


def allocator(device):
    """Return what the backend says that is asked for an allocator."""
    try:
        return str(_backend().mem_allocator)
    except RuntimeError as error:
        return str(error)


def copies(device):
    """Return what a model on two devices of this process finds, what it finds on a CPU, and what was called."""
    torch.manual_seed(0)
    model, input = torch.nn.Linear(4, 2), torch.randn(6, 4)
    expected = model(input)
    host_npu.count_calls()
    found = torch.nn.DataParallel(model.npu(), [0, 1])(input.npu())
    return found, expected, sorted(name for name in host_npu.stats().calls if name.startswith("Hccl"))
