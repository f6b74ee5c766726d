"""Processes that fork, spawn, are killed, or end with work under way, on the CPU and on the host NPU."""

import json
import signal

import pytest
import torch
from host_npu.testing import outcomes, run

from tests import _processes as cases
from tests._children import run_python
from tests._interrupted import LOSSES, interrupt_everywhere

NO_REINITIALISATION = (
    "RuntimeError: Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the "
    "'spawn' start method"
)
# A CPU does the same with fewer parts.
ON_A_CPU = pytest.param("cpu", marks=pytest.mark.exhaustive)


def _run(program, device, *arguments, **settings):
    runner = ["-m", "host_npu"] if device == "npu" else []
    settings["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return run_python(*runner, "-m", "tests._processes", program, device, *arguments, **settings)


def test_a_process_forked_after_use_trains_on_the_cpu():
    [(here, there)] = run(cases.fork_and_train, 1, backend="")
    assert here == there and len(here) == 6


@pytest.mark.parametrize("device", [ON_A_CPU, "npu"])
@pytest.mark.exhaustive
def test_the_workers_of_a_data_loader_are_forked_after_use_and_compute_on_the_cpu(device):
    [batches] = run(cases.load_batches, 1, device=device, backend="")
    assert batches == [0 + 1 + 4 + 9, 16 + 25 + 36 + 49]


def test_a_process_forked_after_use_cannot_use_the_npu_but_its_parent_can():
    [(refused, parent_trains_on)] = run(cases.fork_and_use_the_device, 1, device="npu", backend="")
    assert set(refused[:-1]) == {NO_REINITIALISATION}
    assert "Unable to handle autograd's threading in combination with fork-based multiprocessing" in refused[-1]
    assert parent_trains_on


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_spawned_process_trains_like_its_parent(device):
    result = _run("spawn", device)
    assert result.returncode == 0, result.stderr
    status, here, there = json.loads(result.stdout.splitlines()[-1])
    assert status == 0 and here == there


@pytest.mark.parametrize("device", [ON_A_CPU, "npu"])
def test_a_run_killed_while_saving_resumes_bit_for_bit(device, tmp_path):
    def train(*arguments):
        [outcome] = outcomes(cases.train, 1, *arguments, device=device, backend="")
        return outcome.exit_status

    uninterrupted, killed = tmp_path / "uninterrupted.pt", tmp_path / "killed.pt"
    assert train(uninterrupted, "one by one", -1) == 0
    assert train(killed, "flattened", cases.STEPS // 3) == -signal.SIGKILL
    assert len(torch.load(killed, map_location="cpu")["losses"]) == cases.STEPS // 3 - 1
    assert train(killed, "one by one", -1) == 0
    assert _bytes(torch.load(killed, map_location="cpu")) == _bytes(torch.load(uninterrupted, map_location="cpu"))


def _bytes(contents):
    """Return nested contents with the bytes of tensors in their place, which are equal where nan is, too."""
    if isinstance(contents, torch.Tensor):
        return str(contents.dtype), contents.shape, contents.numpy().tobytes()
    if isinstance(contents, dict):
        return {name: _bytes(value) for name, value in contents.items()}
    return [_bytes(value) for value in contents] if isinstance(contents, list | tuple) else contents


@pytest.mark.parametrize(
    ("way", "status", "queue"),
    [
        pytest.param("return", 0, "0", marks=pytest.mark.exhaustive),
        ("return", 0, "1"),
        pytest.param("return", 0, "2", marks=pytest.mark.exhaustive),
        pytest.param("exit", 3, "1", marks=pytest.mark.exhaustive),
        ("exception", 1, "1"),
    ],
)
def test_a_process_exits_with_work_queued(way, status, queue):
    result = _run("end_with_work_queued", "npu", way, TASK_QUEUE_ENABLE=queue)
    assert result.returncode == status, result.stderr
    assert "the end" in result.stdout.splitlines()  # torch_npu may print a line after an exception
    assert ("ValueError: unhandled" in result.stderr) == (way == "exception")


@pytest.mark.parametrize("device", [ON_A_CPU, "npu"])
@pytest.mark.parametrize(
    "program", ["end_with_daemon_threads", pytest.param("end_with_idle_daemon_threads", marks=pytest.mark.exhaustive)]
)
@pytest.mark.exhaustive
def test_a_process_exits_with_daemon_threads(program, device):
    result = _run(program, device)
    assert (result.returncode, result.stdout) == (0, "the end\n"), result.stderr


@pytest.mark.parametrize("name", LOSSES)
def test_ctrl_c_in_backward_raises_keyboard_interrupt_and_leaks_nothing(name):
    results, is_anything_left = interrupt_everywhere(name, "cpu")
    assert set(results) == {"interrupted"} and not is_anything_left
