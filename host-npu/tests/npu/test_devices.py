"""Two simulated NPUs: their memory, live objects and invalid uses."""

import ctypes
import os
import re
import signal
from pathlib import Path

import host_npu
import pytest
import torch
from host_npu import testing
from tests._runtime import check, message, runtime
from torch_npu.npu.utils import _is_gte_cann_version
from torch_npu.utils.collect_env import get_cann_version


def test_there_are_as_many_devices_as_asked_for():
    ones = torch.ones(3, device="npu:1")
    total = (ones + ones).sum()
    assert (torch.npu.device_count(), str(total.device), total.item()) == (2, "npu:1", 6)


def test_the_folder_and_the_runtime_name_the_same_version_of_cann():
    version = Path(os.environ["ASCEND_HOME_PATH"], "version.info").read_text().removeprefix("Version=").strip()
    assert get_cann_version() == version == "9.1.0"
    assert _is_gte_cann_version(version) and not _is_gte_cann_version(version + "1")


def test_a_device_that_is_not_there_is_refused_with_how_to_get_it():
    expected = "there is no device 2: the host NPU has 2, numbered from 0; HOST_NPU_DEVICES or --devices sets how many"
    with pytest.raises(RuntimeError, match=expected):
        torch.npu.set_device(2)


def test_tensors_move_between_devices():
    assert torch.arange(4, device="npu:0").to("npu:1").tolist() == [0, 1, 2, 3]


def test_views_are_copied_between_devices():
    rows = torch.arange(6.0, device="npu:0").view(2, 3)
    into = torch.zeros(2, 6, device="npu:1")
    into[:, ::2].copy_(rows)
    narrow = torch.zeros(2, 3, dtype=torch.float16, device="npu:1").copy_(rows)
    assert rows.t().to("npu:1").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert rows[:, ::2].to("npu:1").tolist() == [[0, 2], [3, 5]]
    assert into[:, ::2].tolist() == narrow.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("other", "named"), [("npu:1", "npu:0 and npu:1"), ("cpu", "npu:0 and cpu")])
def test_operands_have_to_be_on_one_device(other, named):
    with pytest.raises(RuntimeError, match=f"found at least two devices, {named}"):
        torch.ones(2, device="npu:0") + torch.ones(2, device=other)


def test_only_indices_may_be_the_hosts():
    row = torch.tensor([1])
    assert torch.arange(3, device="npu")[row].tolist() == [1]
    with pytest.raises(RuntimeError, match="found at least two devices, npu:0 and cpu"):
        torch.ones(3)[row.npu()]
    with pytest.raises(RuntimeError, match="found at least two devices, npu:0 and cpu"):
        torch.ones(3, device="npu").index_put_((row,), torch.ones(1))


def test_fresh_memory_holds_no_numbers():
    torch.npu.empty_cache()
    assert torch.empty(2**25, device="npu").isnan().all()


def _read(device: str) -> None:
    ctypes.string_at(torch.ones(1, device=device).data_ptr(), 4)


def _write(device: str) -> None:
    ctypes.memset(torch.ones(1, device=device).data_ptr(), 0, 4)


@pytest.mark.parametrize("touch", [_read, _write])
def test_the_host_cannot_touch_device_memory(touch):
    [outcome] = testing.outcomes(touch, 1, device="npu", devices=2, backend="")
    assert outcome.exit_status == -signal.SIGSEGV
    assert "host NPU: the host touched device memory, which only copies and kernels may access" in outcome.output


def test_memory_is_limited():
    with pytest.raises(RuntimeError, match="^NPU out of memory"):
        torch.empty(2**50, dtype=torch.int8, device="npu")


def test_launches_are_counted_by_operator():
    torch.npu.synchronize()
    host_npu.reset()
    assert host_npu.stats().launches == {}
    torch.ops.aten.mse_loss_backward(*(torch.ones(3, device="npu") for _ in range(3)), 1)
    torch.npu.synchronize()
    assert host_npu.stats().launches == {"aclnnMseLossBackward": 1}


def test_what_is_alive_is_counted():
    before, event = host_npu.stats().alive["aclrtEvent"], ctypes.c_void_p()
    check(runtime.aclrtCreateEvent(ctypes.byref(event)))
    assert host_npu.stats().alive["aclrtEvent"] == before + 1
    check(runtime.aclrtDestroyEvent(event))
    assert host_npu.stats().alive["aclrtEvent"] == before


def test_what_was_never_there_counts_0():
    assert host_npu.stats().alive["a kind that nobody makes"] == 0


def test_device_bytes_are_counted():
    torch.npu.empty_cache()
    host_npu.reset()
    before = host_npu.stats().device_bytes[0]
    tensor = torch.empty(2**25, dtype=torch.int8, device="npu")
    during = host_npu.stats().device_bytes[0] - before
    del tensor
    torch.npu.empty_cache()
    after = host_npu.stats()
    assert during >= 2**25
    assert (after.device_bytes[0], after.peak_device_bytes[0]) == (before, before + during)


def _count_devices() -> int:
    return runtime.aclrtGetDeviceCount(ctypes.byref(ctypes.c_uint32()))


def test_the_nth_call_fails_as_asked():
    message()
    host_npu.fail("aclrtGetDeviceCount", nth=2, status=507899, message="the driver is gone")
    assert host_npu.stats().pending_failures == {"aclrtGetDeviceCount": 1}
    assert [_count_devices() for _ in range(3)] == [0, 507899, 0]
    assert message() == "EZ9999: aclrtGetDeviceCount: the driver is gone"
    assert host_npu.stats().pending_failures == {}


def test_reset_forgets_failures_to_come_and_the_last_error():
    host_npu.fail("aclrtGetDeviceCount")
    host_npu.reset()
    assert _count_devices() == 0
    runtime.aclrtSetDevice(99)
    host_npu.reset()
    assert (message(), runtime.aclrtPeekAtLastError(0)) == (None, 0)


def test_torch_npu_raises_what_was_asked_for_and_goes_on():
    host_npu.fail("aclrtSynchronizeStreamWithTimeout", status=507046, message="asked for")
    with pytest.raises(RuntimeError, match=r"error code is 507046(.|\n)*asked for"):
        torch.npu.current_stream().synchronize()
    assert torch.ones(1, device="npu").item() == 1


_DEVICES = "devices must be a whole number from 1 to 64, got"
_SOCS = f"soc must be one of {', '.join(host_npu.SOCS)}, got"


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"nth": 1.5}, TypeError, "nth must be of type int, got 1.5"),
        ({"status": "x"}, TypeError, "status must be of type int, got 'x'"),
        ({"message": 7}, TypeError, "message must be of type str, got 7"),
        ({"nth": 0}, ValueError, "nth must be at least 1, got 0"),
        ({"status": 0}, ValueError, "status must not be 0, which is success"),
    ],
)
def test_a_failure_that_cannot_be_is_refused(options, error, sentence):
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        host_npu.fail(**{"function": "aclrtMalloc"} | options)


def _is_set(name: str, old: str, new: str) -> str:
    return (
        f"the host NPU is enabled with {name}={old}, and cannot be changed to {new}: start the program with"
        f" {name}={new}, or enable the host NPU once"
    )


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"devices": 0}, ValueError, f"{_DEVICES} 0"),
        ({"devices": "2"}, TypeError, f"{_DEVICES} '2'"),
        ({"devices": True}, TypeError, f"{_DEVICES} True"),
        ({"soc": "Ascend1"}, ValueError, f"{_SOCS} 'Ascend1'"),
        ({"soc": 1}, TypeError, f"{_SOCS} 1"),
        ({"strict_memory": 1}, TypeError, "strict_memory must be True or False, got 1"),
        ({"devices": 3}, host_npu.HostNpuError, _is_set("HOST_NPU_DEVICES", "2", "3")),
        ({"strict_memory": True}, host_npu.HostNpuError, _is_set("HOST_NPU_STRICT_MEMORY", "0", "1")),
    ],
)
def test_another_host_npu_than_that_of_the_process_is_refused(options, error, sentence):
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        host_npu.enable(**options)
    host_npu.enable(devices=2)
