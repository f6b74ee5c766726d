"""Streams and events of the simulated NPUs, and the runtime's errors and messages."""

import ctypes
import threading
import time

import pytest
import torch
from tests._process import on_npu
from tests._runtime import MILLISECONDS, check, delay, handle, message, runtime


def test_streams_are_asynchronous():
    stream = torch.npu.Stream()
    delay(stream)
    assert not stream.query()
    stream.synchronize()
    assert stream.query()


def test_work_on_a_stream_is_done_in_order():
    stream = torch.npu.Stream()
    target, source = torch.zeros(1).pin_memory(), torch.ones(1, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        delay(stream)
        target.copy_(source, non_blocking=True)
    assert target.item() == 0
    stream.synchronize()
    assert target.item() == 1


def test_an_event_is_reached_with_the_work_before_it():
    stream, event = torch.npu.Stream(), torch.npu.Event()
    delay(stream)
    event.record(stream)
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_a_stream_waits_for_an_event_of_another():
    first, second, event = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event()
    delay(first)
    event.record(first)
    second.wait_event(event)
    assert not second.query()
    second.synchronize()
    assert event.query()


def test_events_measure_time():
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    delay(stream)
    end.record(stream)
    stream.synchronize()
    assert start.elapsed_time(end) >= MILLISECONDS


def test_only_events_with_timing_measure_time():
    event = torch.npu.Event()
    event.record()
    torch.npu.synchronize()
    handles = [ctypes.c_void_p(event.npu_event)] * 2
    assert runtime.aclrtEventElapsedTime(ctypes.byref(ctypes.c_float()), *handles) == 107006
    assert "was created without ACL_EVENT_TIME_LINE" in message()


def test_a_result_waits_for_what_still_uses_its_memory():
    # The result of the slow product reuses the block of `overwritten`, which the stream has yet to write.
    factor = torch.eye(1200, device="npu")
    other = factor + 1
    torch.npu.synchronize()
    torch.npu.empty_cache()
    products: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: products.append(factor @ factor))
    thread.start()
    time.sleep(0.01)
    for _ in range(10):
        delay(torch.npu.current_stream())
    overwritten = other.clone()
    del overwritten
    thread.join()
    torch.npu.synchronize()
    assert torch.equal(products[0].cpu(), torch.eye(1200))


def test_threads_may_share_a_stream():
    wrong = []

    def compute(thread: int) -> None:
        for index in range(100):
            number = float(1000 * thread + index)
            tensor = torch.full((64, 64), number).to("npu")
            result = (tensor.T.contiguous().clone() + 1).clone() * 2
            if not (result.cpu() == 2 * (number + 1)).all():
                wrong.append(number)

    threads = [threading.Thread(target=compute, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fault_is_reported_once_by_the_next_synchronisation():
    stream, pointer = torch.npu.Stream(), ctypes.c_void_p()
    check(runtime.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(64), 0))
    delay(stream)
    check(runtime.aclrtMemsetAsync(pointer, ctypes.c_size_t(64), 0, ctypes.c_size_t(64), handle(stream)))
    check(runtime.aclrtFree(pointer))
    with pytest.raises(RuntimeError, match="error code is 507015") as raised:
        stream.synchronize()
    assert "aclrtMemsetAsync failed on stream" in str(raised.value)
    assert "is not live device memory" in str(raised.value)
    stream.synchronize()


_NOT_THE_START = "EZ1001: aclrtFree: 0x1000 is not the start of memory from aclrtMalloc"


def test_a_message_is_there_until_its_thread_has_read_it():
    message()
    assert runtime.aclrtFree(ctypes.c_void_p(4096)) == 107000
    read: list[str | None] = []
    thread = threading.Thread(target=lambda: read.append(message()))
    thread.start()
    thread.join()
    assert [*read, message(), message()] == [None, _NOT_THE_START, None]


def _message_of_initialization() -> str | None:
    torch.ones(2).npu()
    return message()


@pytest.mark.parametrize("soc", ["Ascend910", "Ascend310P"])
def test_torch_npus_initialization_leaves_no_message(soc):
    assert on_npu(_message_of_initialization, HOST_NPU_SOC=soc) is None


def test_callbacks_run_in_the_thread_that_subscribed():
    stream, seen = torch.npu.Stream(), []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(threading.get_ident()))
    thread = ctypes.c_uint64(threading.get_ident())
    check(runtime.aclrtSubscribeReport(thread, handle(stream)))
    check(runtime.aclrtLaunchCallback(callback, None, 1, handle(stream)))
    check(runtime.aclrtProcessReport(10000))
    check(runtime.aclrtUnSubscribeReport(thread, handle(stream)))
    assert seen == [threading.get_ident()]


_WAITS = [
    torch.Tensor.item,
    lambda x: x[x > 0],
    lambda x: x[None].index_put_((x[None] > 0,), x[None]),
    torch.nonzero,
    lambda x: torch.equal(x, x),
]


@pytest.mark.parametrize("waits", _WAITS)
def test_the_debug_mode_reports_what_waits_on_a_device(waits):
    indices = torch.tensor([0, 2], device="npu")
    torch.npu.set_sync_debug_mode("error")
    try:
        total = torch.ones(3, device="npu").mul(2).index_put_((indices,), indices.float() + 1)[indices].sum()
        total[None].index_put_((total[None] < 0,), torch.tensor(0.0))
        with pytest.raises(RuntimeError, match="called a synchronizing NPU operation"):
            waits(total)
    finally:
        torch.npu.set_sync_debug_mode("default")
    assert total.item() == 4
