"""What torch_npu cannot run on the host NPU is refused at the call, and an error in its queue is not forgotten.

Every program runs in a process of its own; this one has no NPU.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests._output import read_json

_PROGRAM = Path(__file__).parent / "queue_facts.py"
_MODES = {
    "no queue": {"TASK_QUEUE_ENABLE": "0"},
    "a queue": {"TASK_QUEUE_ENABLE": "1"},
    "a queue for both phases": {"TASK_QUEUE_ENABLE": "2"},
    "blocking launches": {"ASCEND_LAUNCH_BLOCKING": "1"},
}
_QUEUED = ("a queue", "a queue for both phases")


@pytest.fixture(params=_MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def _results(mode: str, *arguments: str) -> Any:
    removed = {name for environment in _MODES.values() for name in environment}
    environment = {name: value for name, value in os.environ.items() if name not in removed} | _MODES[mode]
    result = subprocess.run(
        [sys.executable, "-m", "host_npu", *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(_PROGRAM.parents[1]), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return read_json(result.stdout)


def _found(what: str, mode: str) -> Any:
    return _results(mode, str(_PROGRAM))[what]


def test_a_graph_operator_is_refused_by_its_name_at_every_call(mode):
    for error in _found("graph_operators", mode)["errors"]:
        assert "the host NPU does not simulate the graph operator (aclop) of npu_confusion_transpose" in error
        assert "Inner error" not in error


def test_after_a_refused_graph_operator_the_queue_computes(mode):
    found = _found("graph_operators", mode)
    assert found["gradient"] == [0.5, 0.5, 0.5, 0.5]
    assert found["sum"] == 32


def test_a_missing_aclnn_function_is_refused_by_its_name_and_the_queue_computes(mode):
    found = _found("missing_functions", mode)
    assert all("the host NPU does not simulate aclnnMoeUpdateExpert" in error for error in found["errors"])
    assert found["sum"] == 128


def test_a_refused_option_ends_the_queue_only_where_it_runs_both_phases(mode):
    found = _results(mode, str(_PROGRAM), "refused_options")["refused_options"]
    if mode == "a queue for both phases":  # docs/limits.md says so
        assert "torch_npu's task queue has ended" in found["later"] and "aclnnDynamicBlockQuant" in found["later"]
    else:
        assert "aclnnDynamicBlockQuant" in found["first"] and found["later"] == ""


@pytest.mark.parametrize("soc", ["Ascend910", "Ascend910B", "Ascend310P"])
def test_a_copy_runs_before_and_after_jit_compile_is_set(soc):
    found = _results("a queue", "--soc", soc, str(_PROGRAM), "online_compilation")["online_compilation"]
    assert found["before"] == found["after"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_the_cast_of_formats_works_after_a_refusal(mode):
    assert _found("casts", mode) == {"format": 29, "equal": True}


def test_a_failure_that_torch_npu_ignores_is_not_taken_for_the_end_of_the_queue(mode):
    assert _found("ignored_failures", mode) == {"pending": {}, "gradient": [0.5] * 4, "sum": 8}


@pytest.mark.parametrize("mode", _QUEUED)
def test_after_the_end_of_the_queue_everything_that_computes_or_reads_says_so(mode):
    found = _found("failures", mode)
    assert "the current working operator name is aclnnMseLossBackward" in found["first"]
    for name, error in found["later"].items():
        assert "torch_npu's task queue has ended" in error, name
        assert "aclnnMseLossBackward: asked for by a test" in error, name


@pytest.mark.parametrize("mode", sorted(_MODES.keys() - set(_QUEUED)))
def test_without_a_queue_a_failed_launch_is_raised_once_and_all_else_goes_on(mode):
    found = _found("failures", mode)
    assert "asked for by a test" in found["first"]
    assert set(found["later"].values()) == {""}


@pytest.mark.parametrize(
    ("mode", "fact", "function"),
    [
        ("a queue for both phases", "exhausted_memory", "aclrtMallocAlign32"),
        ("a queue", "kept_event", "aclrtDestroyEvent"),
        ("a queue for both phases", "kept_event", "aclrtDestroyEvent"),
    ],
)
def test_nothing_is_read_after_a_failure_that_may_have_stopped_the_queue(mode, fact, function):
    found = _results(mode, str(_PROGRAM), fact)[fact]
    assert found["first"] and function in found["later"]
    # Usually the second error. On a busy machine, torch_npu notes its own error only after the host NPU has waited.
    assert "torch_npu's task queue has ended" in found["first"] + found["later"]


@pytest.mark.parametrize("mode", _QUEUED)
def test_the_threads_of_a_queue_wake_up_about_a_thousand_times_a_second(mode):
    found = _results(mode, str(_PROGRAM), "wake_ups")["wake_ups"]
    assert 0 < found["per second"] < 2500
    assert found["before"] == found["after"]


_TWO_DEVICES = """
import json, torch, torch_npu
a, b = (torch.ones(4, device=f"npu:{i}", requires_grad=True) for i in range(2))
for _ in range(30):
    sum(p.square().sum().to("npu:0") for p in (a, b)).backward()
print(json.dumps({"gradients": [a.grad[0].item(), b.grad[0].item()]}))
"""


def test_without_a_queue_a_backward_pass_may_go_over_two_devices():
    assert _results("no queue", "--devices", "2", "-c", _TWO_DEVICES) == {"gradients": [60, 60]}
