"""``host_npu.testing`` runs functions in several processes."""

import os
import signal
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed
from host_npu import testing


def _fail_or_end(device, status):
    if status:
        os._exit(status)
    raise KeyError(device)


def test_a_function_of_the_program_itself_is_refused(monkeypatch):
    monkeypatch.setattr(_fail_or_end, "__module__", "__main__")
    with pytest.raises(ValueError, match="function must be defined in a module"):
        testing.run(_fail_or_end, 2, 0)


def test_a_device_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="device must be 'cpu' or 'npu', got 'cuda'"):
        testing.run(str.upper, 2, device="cuda")


def test_a_process_that_raises_is_reported_with_its_traceback():
    outcome, _ = testing.outcomes(_fail_or_end, 2, 0, backend="")
    assert outcome.exit_status == 1 and "KeyError: 'cpu'" in outcome.error
    with pytest.raises(AssertionError, match="rank 0: Traceback(.|\\n)*KeyError: 'cpu'"):
        testing.run(_fail_or_end, 2, 0, backend="")


def test_a_process_that_ends_is_reported_with_its_status():
    assert [outcome.exit_status for outcome in testing.outcomes(_fail_or_end, 2, 7, backend="")] == [7, 7]


def _fail_on(device, failing):
    if torch.distributed.get_rank() in failing:
        raise KeyError("mine")
    tensor = torch.ones(1, device=device)
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_the_rank_that_failed_first_is_reported_first(device):
    with pytest.raises(AssertionError) as caught:
        testing.run(_fail_on, 2, (1,), device=device, devices=2)
    message = str(caught.value)
    assert message.startswith("rank 1: Traceback") and "KeyError: 'mine'" in message
    # Gloo's ranks detect that another rank has gone.
    assert ("\nrank 0: killed 5 s after rank 1 had failed\n" if device == "npu" else "\nrank 0: Traceback") in message


def test_every_rank_that_failed_is_in_the_report_and_no_other():
    with pytest.raises(AssertionError) as caught:
        testing.run(_raise_in_turn, 3, backend="")
    ranks = [line for line in str(caught.value).splitlines() if line.startswith("rank ")]
    assert ranks == ["rank 2: Traceback (most recent call last):", "rank 0: Traceback (most recent call last):"]


def _output():
    """Return this process's output file, whose name contains the rank, even without a group."""
    return Path(os.readlink("/proc/self/fd/1"))


def _raise_in_turn(device):
    output = _output()
    rank = int(output.stem)
    if rank == 0:
        while not output.with_name("2.result").exists():
            time.sleep(0.01)
    if rank != 1:
        raise KeyError(rank)


def _raise_or_sleep(device):
    if int(_output().stem) == 0:
        raise KeyError("mine")
    time.sleep(60)


def test_the_others_have_as_much_time_as_they_were_given():
    first, second = testing.outcomes(_raise_or_sleep, 2, backend="", grace=0.5)
    assert first.exit_status == 1
    assert (second.exit_status, second.error) == (-signal.SIGKILL, "killed 0.5 s after rank 0 had failed")


def _sleep(device, seconds):
    time.sleep(seconds)


def test_a_process_that_takes_too_long_is_reported_with_the_timeout():
    with pytest.raises(AssertionError, match="rank 0: killed after the timeout of 0.5 s"):
        testing.run(_sleep, 1, 60, backend="", timeout=0.5)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(7, "exit status 7"), (1, "exit status 1"), (0, "exit status 0"), (-9, "SIGKILL")],
)
def test_a_process_that_ends_before_its_function_is_reported(status, sentence):
    with pytest.raises(AssertionError, match=f"rank 0: ended with {sentence} before its function returned"):
        testing.run(_end, 1, status, backend="")


def _end(device, status):
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def _return_a_function(device):
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_reported():
    with pytest.raises(AssertionError, match="rank 0: Traceback(.|\\n)*[Pp]ickle"):
        testing.run(_return_a_function, 1, backend="")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"devices": 0}, ValueError, "devices must be a whole number from 1 to 64, got 0"),
        ({"devices": 65}, ValueError, "devices must be a whole number from 1 to 64, got 65"),
        ({"devices": "2"}, TypeError, "devices must be a whole number from 1 to 64, got '2'"),
        ({"world_size": 0}, ValueError, "world_size must be a whole number of at least 1, got 0"),
        ({"world_size": 2.0}, TypeError, "world_size must be a whole number of at least 1, got 2.0"),
        ({"world_size": True}, TypeError, "world_size must be a whole number of at least 1, got True"),
        ({"timeout": 0}, ValueError, "timeout must be a positive number of seconds, got 0"),
        ({"grace": -1}, ValueError, "grace must be a positive number of seconds, got -1"),
        ({"backend": 1}, TypeError, "backend must be a string or None, got 1"),
        ({"environment": {"A": 1}}, TypeError, "environment must have strings as names and values, got {'A': 1}"),
        ({"function": "upper"}, TypeError, "function must be callable, got 'upper'"),
    ],
)
def test_a_wrong_argument_is_named_before_a_process_starts(arguments, error, message, monkeypatch):
    monkeypatch.setattr(testing, "_answer", None)
    with pytest.raises(error) as caught:
        testing.run(**{"function": str.upper, "world_size": 2, "device": "npu"} | arguments)
    assert str(caught.value) == message


def test_a_function_that_cannot_be_pickled_is_refused_and_the_next_one_runs():
    with pytest.raises(ValueError, match="function must be defined at the top level of a module"):
        testing.run(lambda device: device, 1, backend="")
    assert testing.run(str.upper, 1, backend="") == ["CPU"]


def test_a_function_that_the_processes_cannot_import_is_named_and_the_next_one_runs(monkeypatch):
    module = types.ModuleType("a_module_that_is_nowhere")
    exec("def function(device): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RuntimeError, match="No module named 'a_module_that_is_nowhere'"):
        testing.run(module.function, 1, backend="")
    assert testing.run(str.upper, 1, backend="") == ["CPU"]


def test_a_call_that_was_interrupted_does_not_answer_the_next_one():
    def interrupt(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(TimeoutError):
            testing.run(_sleep, 1, 60, backend="")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert testing.run(str.upper, 1, backend="") == ["CPU"]
