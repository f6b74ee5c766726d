"""Find out how two simulated NPUs behave, and print it as JSON; run by test_enable.py."""

import ctypes
import json
import sys
import threading
import time

import host_npu
import operator_facts as operator_facts  # its facts are among those printed
import torch
from _facts import error_of, fact, facts

MILLISECONDS = 40

runtime = ctypes.CDLL("libascendcl.so")
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)


def handle(stream: torch.npu.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.npu_stream)


def delay(stream: torch.npu.Stream) -> None:
    """Keep a stream busy for a while."""
    check(runtime.aclrtLaunchHostFunc(handle(stream), sleep, ctypes.c_void_p(1000 * MILLISECONDS)))


def check(status: int) -> None:
    assert status == 0, (status, message())


def message() -> str | None:
    text = runtime.aclGetRecentErrMsg()
    return None if text is None else text.decode()


@fact
def devices():
    ones = torch.ones(3, device="npu:1")
    total = (ones + ones).sum()
    return {"count": torch.npu.device_count(), "device": str(total.device), "total": total.item()}


@fact
def copy_between_devices():
    return torch.arange(4, device="npu:0").to("npu:1").cpu().tolist()


@fact
def copies_of_views_between_devices():
    rows = torch.arange(6.0, device="npu:0").view(2, 3)
    into = torch.zeros(2, 6, device="npu:1")
    into[:, ::2].copy_(rows)
    narrow = torch.zeros(2, 3, dtype=torch.float16, device="npu:1").copy_(rows)
    return [x.tolist() for x in (rows.t().to("npu:1"), rows[:, ::2].to("npu:1"), into[:, ::2], narrow)]


@fact
def operands_on_two_devices():
    return error_of(lambda: torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1"))


@fact
def operands_on_device_and_host():
    return error_of(lambda: torch.ones(2, device="npu:0") + torch.ones(2))


@fact
def fresh_memory():
    # More than what torch_npu may have kept.
    return torch.empty(2**23, device="npu").isnan().all().item()


@fact
def stream_is_asynchronous():
    stream = torch.npu.Stream()
    delay(stream)
    before = stream.query()
    stream.synchronize()
    return before, stream.query()


@fact
def stream_is_ordered():
    stream = torch.npu.Stream()
    target = torch.zeros(1).pin_memory()
    source = torch.ones(1, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        delay(stream)
        target.copy_(source, non_blocking=True)
    before = target.item()
    stream.synchronize()
    return before, target.item()


@fact
def event_waits_for_its_stream():
    stream, event = torch.npu.Stream(), torch.npu.Event()
    delay(stream)
    event.record(stream)
    before = event.query()
    event.synchronize()
    return before, event.query()


@fact
def stream_waits_for_an_event():
    first, second, event = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event()
    delay(first)
    event.record(first)
    second.wait_event(event)
    before = second.query()
    second.synchronize()
    return before, event.query()


@fact
def elapsed_time():
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    delay(stream)
    end.record(stream)
    stream.synchronize()
    return start.elapsed_time(end)


@fact
def elapsed_time_of_an_event_without_timing():
    event = torch.npu.Event()
    event.record()
    torch.npu.synchronize()
    status = runtime.aclrtEventElapsedTime(ctypes.byref(ctypes.c_float()), *2 * (ctypes.c_void_p(event.npu_event),))
    return status, message()


@fact
def fault_on_a_stream():
    stream = torch.npu.Stream()
    pointer = ctypes.c_void_p()
    check(runtime.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(64), 0))
    delay(stream)
    check(runtime.aclrtMemsetAsync(pointer, ctypes.c_size_t(64), 0, ctypes.c_size_t(64), handle(stream)))
    check(runtime.aclrtFree(pointer))
    return error_of(stream.synchronize), error_of(stream.synchronize)


@fact
def message_is_read_once():
    nothing = message()
    status = runtime.aclrtFree(ctypes.c_void_p(4096))
    return nothing, status, message(), message()


@fact
def message_belongs_to_its_thread():
    read = []
    runtime.aclrtFree(ctypes.c_void_p(4096))
    thread = threading.Thread(target=lambda: read.append(message()))
    thread.start()
    thread.join()
    return read[0], message() is not None


@fact
def out_of_memory():
    return error_of(lambda: torch.empty(2**50, dtype=torch.int8, device="npu"))


@fact
def callback_runs_in_the_thread_that_subscribed():
    stream = torch.npu.Stream()
    seen = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(threading.get_ident()))
    thread = ctypes.c_uint64(threading.get_ident())
    check(runtime.aclrtSubscribeReport(thread, handle(stream)))
    check(runtime.aclrtLaunchCallback(callback, None, 1, handle(stream)))
    check(runtime.aclrtProcessReport(10000))
    check(runtime.aclrtUnSubscribeReport(thread, handle(stream)))
    return seen == [threading.get_ident()]


@fact
def operands_of_an_index():
    row = torch.tensor([1])
    return [
        error_of(lambda: torch.ones(3)[row.npu()]),
        torch.arange(3, device="npu")[row].tolist(),
        error_of(lambda: torch.ones(3, device="npu").index_put_((row,), torch.ones(1))),
    ]


@fact
def memory_that_another_thread_has_freed():
    # The result of the slow product gets the block of `overwritten`, which the stream has yet to write.
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
    return torch.equal(products[0].cpu(), torch.eye(1200))


@fact
def threads_on_one_stream():
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
    return wrong


@fact
def mse_loss():
    torch.npu.synchronize()
    host_npu.reset()
    empty = host_npu.stats().launches
    torch.ops.aten.mse_loss_backward(*(torch.ones(3, device="npu") for _ in range(3)), 1)
    torch.npu.synchronize()
    return empty, host_npu.stats().launches


@fact
def alive():
    counts = [host_npu.stats().alive["aclrtEvent"]]
    event = ctypes.c_void_p()
    check(runtime.aclrtCreateEvent(ctypes.byref(event)))
    counts.append(host_npu.stats().alive["aclrtEvent"])
    check(runtime.aclrtDestroyEvent(event))
    counts.append(host_npu.stats().alive["aclrtEvent"])
    return [count - counts[0] for count in counts]


@fact
def never_alive():
    return host_npu.stats().alive["a kind that nobody makes"]


@fact
def device_bytes():
    torch.npu.empty_cache()
    host_npu.reset()
    before = host_npu.stats().device_bytes[0]
    tensor = torch.empty(2**25, dtype=torch.int8, device="npu")
    during = host_npu.stats().device_bytes[0]
    del tensor
    torch.npu.empty_cache()
    after = host_npu.stats()
    return [during - before, after.device_bytes[0] - before, after.peak_device_bytes[0] - before]


@fact
def failure_of_the_second_call():
    count = ctypes.c_uint32()
    message()
    host_npu.fail("aclrtGetDeviceCount", nth=2, status=507899, message="the driver is gone")
    pending = host_npu.stats().pending_failures
    statuses = [runtime.aclrtGetDeviceCount(ctypes.byref(count)) for _ in range(3)]
    return pending, statuses, message(), host_npu.stats().pending_failures


@fact
def failure_that_reset_forgets():
    host_npu.fail("aclrtGetDeviceCount")
    host_npu.reset()
    return runtime.aclrtGetDeviceCount(ctypes.byref(ctypes.c_uint32()))


@fact
def device_that_is_not_there():
    return error_of(lambda: torch.npu.set_device(2))


@fact
def error_that_reset_forgets():
    runtime.aclrtSetDevice(99)
    host_npu.reset()
    return message(), runtime.aclrtPeekAtLastError(0)


@fact
def failure_in_torch_npu():
    host_npu.fail("aclrtSynchronizeStreamWithTimeout", status=507046, message="asked for")
    return error_of(torch.npu.current_stream().synchronize), torch.ones(1, device="npu").item()


@fact
def invalid_requests():
    errors = []
    for call in (
        lambda: host_npu.fail("npu_rms_norm"),
        lambda: host_npu.fail("malloc"),
        lambda: host_npu.fail("aclrtMalloc", nth=1.5),
        lambda: host_npu.fail("aclrtMalloc", status="x"),
        lambda: host_npu.fail("aclrtMalloc", message=7),
        lambda: host_npu.fail("aclrtMalloc", nth=0),
        lambda: host_npu.fail("aclrtMalloc", status=0),
        lambda: host_npu.enable(devices=0),
        lambda: host_npu.enable(devices="2"),
        lambda: host_npu.enable(devices=True),
        lambda: host_npu.enable(soc="Ascend1"),
        lambda: host_npu.enable(soc=1),
        lambda: host_npu.enable(strict_memory=1),
        lambda: host_npu.enable(devices=3),
        lambda: host_npu.enable(strict_memory=True),
    ):
        try:
            call()
        except (TypeError, ValueError, host_npu.HostNpuError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    host_npu.enable(devices=2)
    return errors


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, object] = {"arguments": sys.argv[1:]}
    for name, function in facts.items():
        try:
            found[name] = function()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    # On a line of its own, after what torch_npu may have printed.
    print(json.dumps(found))


if __name__ == "__main__":
    main()
