"""The functions of HCCL that torch_npu looks up exist: simulated, or refused by name."""

import ctypes
import re
import subprocess

import host_npu
import pytest
import torch
import torch.distributed as dist
from host_npu import _libraries, _torch_npu, testing

_REFUSED = [
    *("HcclCommInitClusterInfoConfig", "HcclCommResume", "HcclCommWorkingDevNicSet", "HcclCommRegister"),
    *("HcclCommExchangeMem", "HcclCommDeregister", "HcclCommSymWinRegister", "HcclCommSymWinDeregister"),
    *("HcclCommSetMemoryRange", "HcclCommUnsetMemoryRange", "HcclCommActivateCommMemory"),
    "HcclCommDeactivateCommMemory",
]
_TABLE = '{"version": "1.0", "server_count": "1", "server_list": [], "status": "completed"}'


def _exported():
    command = ["nm", "-D", "--defined-only", *(_libraries._path(name) for name in ("hccl", "hcomm"))]
    return set(re.findall(r" T (Hc\w+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def _bound():
    """Return the names of HCCL functions in torch_npu's library, which also has its own names with the same prefix."""
    folder = _torch_npu.folder()
    headers, library = folder / "include", folder / "lib" / "libtorch_npu.so"
    paths = "third_party/hccl/inc/hccl/hccl.h", "torch_npu/csrc/distributed/HcclCompile.h"
    declarations = "".join((headers / path).read_text() for path in paths)
    declared = set(re.findall(r"\b(Hccl[A-Z]\w+)\(|FUNCTION\((Hccl\w+)\)", declarations))
    names = {name.decode() for name in re.findall(rb"\0(Hccl[A-Z]\w+)(?=\0)", library.read_bytes())}
    return names & {name for pair in declared for name in pair}


def test_every_function_that_torch_npu_looks_up_is_exported():
    assert len(_bound()) > 30 and _bound() <= _exported()


def _all_reduce(device):
    """Return a sum of a sum in another group, and the functions that were called."""
    host_npu.count_calls()
    x = torch.ones(2, device=device)
    group = dist.new_group([0, 1], backend="hccl")
    for each in (None, group):
        dist.all_reduce(x, group=each)
    found = x.tolist()
    dist.destroy_process_group(group)
    return found, {name for name in host_npu.stats().calls if name.startswith("Hccl")}


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch_npu 2.9 has fewer functions")
@pytest.mark.parametrize(
    ("environment", "functions"),
    [
        ({}, {"HcclGetRootInfo", "HcclCommInitRootInfoConfig", "HcclAllReduce", "HcclCommDestroy"}),
        (
            {"ROOTINFO_SCALABLE_ENABLE": "1", "TORCH_HCCL_RANKS_PER_ROOT": "1"},
            {"HcclGetRootInfoScalable", "HcclCommInitRootInfoScalable"},
        ),
        # The first is refused, and torch_npu continues with root infos.
        ({"RANK_TABLE_FILE": "table.json"}, {"HcclCommInitClusterInfoConfig", "HcclGetRootInfo"}),
    ],
    ids=["a root", "several roots", "a rank table"],
)
def test_communicators_are_made_in_every_way_of_torch_npu(environment, functions, tmp_path):
    if "RANK_TABLE_FILE" in environment:
        (tmp_path / "table.json").write_text(_TABLE)
        environment = {"RANK_TABLE_FILE": str(tmp_path / "table.json")}
    results, called = zip(*testing.run(_all_reduce, 2, device="npu", environment=environment), strict=True)
    assert results == ([4, 4], [4, 4])
    assert functions <= set().union(*called)


def _data_parallel(device):
    torch.manual_seed(0)
    model, input = torch.nn.Linear(4, 2), torch.randn(6, 4)
    expected = model(input)
    host_npu.count_calls()
    found = torch.nn.DataParallel(model.npu(), [0, 1])(input.npu())
    return found, expected, set(host_npu.stats().calls)


@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA's _scatter of torch comes before torch_npu's")
def test_devices_of_one_process_copy_to_each_other():
    [(found, expected, called)] = testing.run(_data_parallel, 1, device="npu", devices=2, backend="")
    torch.testing.assert_close(found, expected)
    assert {"HcclCommInitAll", "HcclBroadcast"} <= called


def _answers(device):
    """Return the status and message of functions that check no argument."""
    library, runtime = ctypes.CDLL("libhccl.so"), ctypes.CDLL("libascendcl.so")
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    calls = {name: getattr(library, name) for name in _REFUSED}
    return {name: (call(*[None] * 6), runtime.aclGetRecentErrMsg().decode()) for name, call in calls.items()}


def test_what_is_refused_says_so():
    [found] = testing.run(_answers, 1, device="npu", backend="")
    for function, (status, message) in found.items():
        assert status == 5, function
        assert message.startswith(f"EZ9999: {function}: the host NPU does not simulate ")


def _root_info(device):
    info = ctypes.create_string_buffer(4108)
    ctypes.CDLL("libhccl.so").HcclGetRootInfo(info)
    return info.raw


def _joined(device, root_info):
    """Return the error message of a joining rank."""
    ctypes.CDLL("libhccl.so").HcclCommInitRootInfo(2, root_info, 1, ctypes.byref(ctypes.c_void_p()))
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return runtime.aclGetRecentErrMsg().decode()


def test_a_root_that_has_ended_is_not_waited_for():
    [root_info] = testing.run(_root_info, 1, device="npu", backend="")
    [message] = testing.run(_joined, 1, root_info, device="npu", backend="")
    assert "which made rootInfo, has ended" in message
