"""Find out what is left of torch_npu's queue after refusals and failures, and print it as JSON.

It is run by test_queue.py in each mode of the queue, and with the name of a function to call only this one.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import host_npu
import torch
import torch_npu
from _facts import error_of

_Calls = dict[str, Callable[[], object]]


def graph_operators() -> dict[str, object]:
    """Return what three calls of a graph operator raise, and what the queue computes in between and afterwards."""
    x = torch.rand(2, 4, 2, 2, device="npu")
    errors = [
        error_of(lambda: torch_npu.npu_confusion_transpose(x, (0, 2, 1, 3), (2, 4, 2, 2), True)) for _ in range(3)
    ]
    input = torch.ones(4, device="npu", requires_grad=True)
    torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu")).backward()
    assert input.grad is not None
    return {"errors": errors, "gradient": input.grad.tolist(), "sum": (x - x + 1).sum().item()}


def missing_functions() -> dict[str, object]:
    x, experts = torch.rand(4, 32).npu(), torch.zeros(4, 2, dtype=torch.int32).npu()
    # With both phases in the queue, the refusal comes with the next synchronization.
    errors = [
        error_of(lambda: (torch_npu.npu_moe_update_expert(experts, experts), torch.npu.synchronize())) for _ in range(2)
    ]
    return {"errors": errors, "sum": (x - x + 1).sum().item()}


def refused_options() -> dict[str, object]:
    """Return what a call with an option that is not simulated raises, and a later call of another operator."""
    x = torch.ones(32, 32, device="npu", dtype=torch.float16)
    first = error_of(lambda: (torch_npu.npu_dynamic_block_quant(x, min_scale=0.5), torch.npu.synchronize()))
    return {"first": first, "later": error_of(lambda: x.sum().item())}


def online_compilation() -> dict[str, object]:
    x = torch.arange(6.0).reshape(2, 3).npu()
    before = x.t().contiguous().tolist()
    torch.npu.set_compile_mode(jit_compile=True)
    return {"before": before, "after": x.t().contiguous().tolist()}


def casts() -> dict[str, object]:
    """Return what Identity, a graph operator that is simulated, makes of a matrix after another was refused."""
    torch.npu.config.allow_internal_format = True
    x = torch.arange(24.0).reshape(4, 6).npu()
    y = torch.rand(2, 4, 2, 2, device="npu")
    error_of(lambda: torch_npu.npu_confusion_transpose(y, (0, 2, 1, 3), (2, 4, 2, 2), True))
    tiled = torch_npu.npu_format_cast(x, 29)
    return {"format": torch_npu.get_npu_format(tiled), "equal": torch.equal(torch_npu.npu_format_cast(tiled, 2), x)}


def ignored_failures() -> dict[str, object]:
    """Return what is computed after a failure that torch_npu does not look at."""
    input = torch.ones(4, device="npu", requires_grad=True)
    loss = torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu"))
    torch.npu.synchronize()
    host_npu.fail("aclDestroyTensor")
    loss.backward()
    torch.npu.synchronize()
    pending = host_npu.stats().pending_failures
    assert input.grad is not None
    return {"pending": pending, "gradient": input.grad.tolist(), "sum": (input + 1).sum().item()}


def failures() -> dict[str, object]:
    """Return what each call raises after a launch has failed and the program has caught what torch_npu raised."""
    x = torch.ones(4, device="npu")
    input = torch.ones(4, device="npu", requires_grad=True)
    loss = torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu"))
    torch.npu.synchronize()
    host_npu.fail("aclnnMseLossBackward", status=361001, message="asked for by a test")

    def fail() -> None:
        loss.backward(retain_graph=True)
        torch.npu.synchronize()

    calls: _Calls = {
        "the operator": lambda: (loss.backward(), input.grad.cpu()),
        "an operator of the CPU": lambda: x + 1,
        "an operator in place": lambda: x.add_(1),
        "a random number": lambda: torch.rand(3, device="npu"),
        "a copy to the host": lambda: x.cpu(),
        "a copy to the device": lambda: torch.ones(3).npu(),
        "a copy on the device": lambda: x.clone().tolist(),
        "a number": lambda: x.sum().item(),
        "an element": lambda: x[0].item(),
        "a comparison": lambda: torch.equal(x, x),
        "the device": torch.npu.synchronize,
        "the stream": lambda: torch.npu.current_stream().synchronize(),
    }
    first = error_of(fail)
    return {"first": first, "later": {name: error_of(call) for name, call in calls.items()}}


def exhausted_memory() -> dict[str, object]:
    """Return what calls raise after a workspace could not be allocated, which the queue does with both phases in it."""
    input, target = torch.ones(64, device="npu"), torch.zeros(64, device="npu")
    torch.nn.functional.mse_loss(input, target).item()
    torch.npu.empty_cache()
    host_npu.fail("aclrtMallocAlign32")
    first = error_of(lambda: (torch.nn.functional.mse_loss(input, target), torch.npu.synchronize()))
    return {"first": first, "later": error_of(lambda: torch.arange(6).npu()[::2].contiguous().tolist())}


def kept_event() -> dict[str, object]:
    """Return what calls raise after an event could not be destroyed, which the queue does."""
    event = torch.npu.Event()
    event.record()
    host_npu.fail("aclrtDestroyEvent")
    del event
    first = error_of(torch.npu.synchronize)
    return {"first": first, "later": error_of(lambda: torch.arange(6).npu()[::2].contiguous().tolist())}


def wake_ups() -> dict[str, object]:
    """Return this thread's timer slack in ns around the start of those of torch_npu, and how often these wake up."""

    def timer_slack() -> int:
        get_timer_slack = 30
        return ctypes.CDLL(None).prctl(get_timer_slack)

    def wake_ups_of_release_threads() -> int:
        statuses = [
            dict(line.split(":\t") for line in (task / "status").read_text().splitlines())
            for task in Path("/proc/self/task").iterdir()
        ]
        return sum(int(status["voluntary_ctxt_switches"]) for status in statuses if status["Name"] == "release_thread")

    before = timer_slack()
    torch.ones(3, device="npu").sum().item()
    started, first = time.perf_counter(), wake_ups_of_release_threads()
    time.sleep(0.5)
    rate = (wake_ups_of_release_threads() - first) / (time.perf_counter() - started)
    return {"before": before, "after": timer_slack(), "per second": rate}


if __name__ == "__main__":
    wanted = (
        [globals()[sys.argv[1]]]
        if sys.argv[1:]
        else [graph_operators, missing_functions, casts, ignored_failures, failures]
    )
    print(json.dumps({function.__name__: function() for function in wanted}))
