"""Unsupported operators are refused at the call, and errors in torch_npu's queue are reported.

Every program runs in its own process, in each mode of the queue.
"""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import host_npu
import pytest
import torch
import torch_npu
from tests._process import error_of, on_npu

_QUEUED = {"a queue": "1", "a queue for both phases": "2"}
_UNQUEUED = {"no queue": "0", "blocking launches": "1"}
_LATEST = "a queue for both phases"


def _run(function: Callable[[], object], mode: str) -> object:
    level = (_QUEUED | _UNQUEUED)[mode]
    return on_npu(function, TASK_QUEUE_ENABLE=level, ASCEND_LAUNCH_BLOCKING=str(int(mode == "blocking launches")))


@pytest.fixture(params=_QUEUED | _UNQUEUED)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def _gradient_of_mse_loss() -> list[float]:
    input = torch.ones(4, device="npu", requires_grad=True)
    torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu")).backward()
    return input.grad.tolist()


def _maximum_by_a_graph_operator() -> str:
    x = torch.rand(2, 4, device="npu")
    return error_of(lambda: torch_npu.npu_max(x, 1))


def _call_graph_operators() -> None:
    for _ in range(3):
        error = _maximum_by_a_graph_operator()
        assert "the host NPU does not simulate the graph operator (aclop) of npu_max" in error
        assert "Inner error" not in error
    assert _gradient_of_mse_loss() == [0.5] * 4
    # Identity, a simulated graph operator.
    torch.npu.config.allow_internal_format = True
    x = torch.arange(24.0).reshape(4, 6).npu()
    tiled = torch_npu.npu_format_cast(x, 29)
    assert torch_npu.get_npu_format(tiled) == 29
    assert torch.equal(torch_npu.npu_format_cast(tiled, 2), x)


def test_a_graph_operator_is_refused_by_its_name_at_every_call_and_the_queue_computes(mode):
    _run(_call_graph_operators, mode)


def _call_missing_functions() -> None:
    x = torch.rand(4, 32).npu()
    for _ in range(2):
        # With both phases in the queue, the next synchronization raises the refusal.
        error = error_of(lambda: (torch_npu.npu_sim_exponential_(x), torch.npu.synchronize()))
        assert "the host NPU does not simulate aclnnSimThreadExponential" in error
    assert (x - x + 1).sum().item() == 128


def test_a_missing_aclnn_function_is_refused_by_its_name_and_the_queue_computes(mode):
    _run(_call_missing_functions, mode)


def _call_with_a_refused_option() -> tuple[str, str]:
    x = torch.ones(32, 32, device="npu", dtype=torch.float16)
    first = error_of(lambda: (torch_npu.npu_dynamic_block_quant(x, min_scale=0.5), torch.npu.synchronize()))
    return first, error_of(lambda: x.sum().item())


def test_a_refused_option_ends_the_queue_only_where_it_runs_both_phases(mode):
    first, later = _run(_call_with_a_refused_option, mode)
    if mode == _LATEST:  # documented in docs/limits.md
        assert "torch_npu's task queue has ended" in later and "aclnnDynamicBlockQuant" in later
    else:
        assert "aclnnDynamicBlockQuant" in first and later == ""


def _copy_before_and_after_jit_compile() -> None:
    x = torch.arange(6.0).reshape(2, 3).npu()
    before = x.t().contiguous().tolist()
    torch.npu.set_compile_mode(jit_compile=True)
    assert before == x.t().contiguous().tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("soc", ["Ascend910", "Ascend910B", "Ascend310P"])
def test_a_copy_runs_before_and_after_jit_compile_is_set(soc):
    on_npu(_copy_before_and_after_jit_compile, HOST_NPU_SOC=soc)


def _let_a_failure_be_ignored() -> None:
    input = torch.ones(4, device="npu", requires_grad=True)
    loss = torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu"))
    torch.npu.synchronize()
    host_npu.fail("aclDestroyTensor")
    loss.backward()
    torch.npu.synchronize()
    assert host_npu.stats().pending_failures == {}
    assert input.grad.tolist() == [0.5] * 4 and (input + 1).sum().item() == 8


def test_a_failure_that_torch_npu_ignores_is_not_taken_for_the_end_of_the_queue(mode):
    _run(_let_a_failure_be_ignored, mode)


def _fail_and_go_on() -> tuple[str, dict[str, str]]:
    """Return the error of a failing launch, and of every later call."""
    x = torch.ones(4, device="npu")
    input = torch.ones(4, device="npu", requires_grad=True)
    loss = torch.nn.functional.mse_loss(input, torch.zeros(4, device="npu"))
    torch.npu.synchronize()
    host_npu.fail("aclnnMseLossBackward", status=361001, message="asked for by a test")
    # torch_npu empties its queue before it records the failure: a synchronization in between gets the host NPU's error.
    errors = (error_of(lambda: (loss.backward(retain_graph=True), torch.npu.synchronize())) for _ in range(100))
    first = next(error for error in errors if "torch_npu's task queue has ended" not in error)
    calls: dict[str, Callable[[], object]] = {
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
    return first, {name: error_of(call) for name, call in calls.items()}


@pytest.mark.parametrize("mode", _QUEUED)
def test_after_the_end_of_the_queue_everything_that_computes_or_reads_says_so(mode):
    first, later = _run(_fail_and_go_on, mode)
    assert "the current working operator name is aclnnMseLossBackward" in first
    for name, error in later.items():
        assert "torch_npu's task queue has ended" in error, name
        assert "aclnnMseLossBackward: asked for by a test" in error, name


@pytest.mark.parametrize("mode", _UNQUEUED)
def test_without_a_queue_a_failed_launch_is_raised_once_and_all_else_goes_on(mode):
    first, later = _run(_fail_and_go_on, mode)
    assert "asked for by a test" in first
    assert set(later.values()) == {""}


def _read_something() -> str:
    return error_of(lambda: torch.arange(6).npu()[::2].contiguous().tolist())


def _exhaust_memory() -> tuple[str, str]:
    """Fail to allocate a workspace, in the queue if it runs both phases."""
    input, target = torch.ones(64, device="npu"), torch.zeros(64, device="npu")
    torch.nn.functional.mse_loss(input, target).item()
    torch.npu.empty_cache()
    host_npu.fail("aclrtMallocAlign32")
    first = error_of(lambda: (torch.nn.functional.mse_loss(input, target), torch.npu.synchronize()))
    return first, _read_something()


def _keep_an_event() -> tuple[str, str]:
    """Fail to destroy an event in the queue."""
    event = torch.npu.Event()
    event.record()
    host_npu.fail("aclrtDestroyEvent")
    del event
    return error_of(torch.npu.synchronize), _read_something()


@pytest.mark.parametrize(
    ("mode", "program", "function"),
    [
        (_LATEST, _exhaust_memory, "aclrtMallocAlign32"),
        ("a queue", _keep_an_event, "aclrtDestroyEvent"),
        (_LATEST, _keep_an_event, "aclrtDestroyEvent"),
    ],
)
def test_nothing_is_read_after_a_failure_that_may_have_stopped_the_queue(mode, program, function):
    first, later = _run(program, mode)
    assert first and function in later
    # Usually in the second error: on a busy machine, torch_npu records its error only after the host NPU has waited.
    assert "torch_npu's task queue has ended" in first + later


def _count_wake_ups() -> None:
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
    assert 0 < rate < 2500
    assert timer_slack() == before


@pytest.mark.parametrize("mode", _QUEUED)
def test_the_threads_of_a_queue_wake_up_about_a_thousand_times_a_second(mode):
    _run(_count_wake_ups, mode)


def _go_back_over_two_devices() -> None:
    a, b = (torch.ones(4, device=f"npu:{i}", requires_grad=True) for i in range(2))
    for _ in range(30):
        sum(p.square().sum().to("npu:0") for p in (a, b)).backward()
    assert a.grad[0].item() == b.grad[0].item() == 60


def test_without_a_queue_a_backward_pass_may_go_over_two_devices():
    _run(_go_back_over_two_devices, "no queue")
