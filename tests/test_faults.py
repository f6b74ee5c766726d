"""Any CANN function may fail: the driver of tests/faults.py detects lost state, and none is lost."""

import json

import pytest

from tests import faults
from tests.test_npu import _run, _run_program

# What an action does with a failure, and what the driver has to say of it.
FAULTY = {
    "an exception": ("raise RuntimeError('first')", "one exception"),
    "a failure that is overcome": ("pass", "no exception"),
    "a wrong result": ("self.wrong = 'the result is wrong'", "no exception, then the result is wrong"),
    "an exception that spoils the next call": (
        "self.wrong = 'it is spoilt'; raise RuntimeError('first')",
        "one exception, then it is spoilt",
    ),
    "a second exception": (
        "del self.wrong; raise RuntimeError('first')",
        "one exception, then another: 'Faulty' object",
    ),
    "a tensor that is not destroyed": ("create_tensor(*[None] * 9)", "no exception, and left: 1 aclTensor"),
    "memory that is not freed": ("kept.append(torch.ones(9).npu())", "no exception, and left: 2097152 bytes"),
    "a process that ends": ("os.abort()", "the process ends by SIGABRT"),
    "a process that hangs": ("time.sleep(1000)", "the process hangs"),
    "a wait that nobody ends": ("os.read(os.eventfd(0), 8)", "the process hangs, in a wait for an eventfd"),
}


@pytest.mark.exhaustive
def test_the_driver_detects_every_kind_of_failure(tmp_path):
    result = _run_program(
        tmp_path,
        f"""
        import ctypes, json, os, time
        import torch
        from tests import faults
        from tests._fault_cases import Case

        runtime, kept = ctypes.CDLL(None), []
        create_tensor = runtime.aclCreateTensor

        class Faulty:
            def __init__(self, code):
                self.code, self.wrong = code, ""
                torch.ones(1).npu()

            def act(self):
                if runtime.aclrtGetDeviceCount(ctypes.byref(ctypes.c_uint32())):
                    exec(self.code)

            def lost(self, error):
                return self.wrong

        codes = {[code for code, _ in FAULTY.values()]}
        chosen = [Case("faulty", code, lambda code=code: Faulty(code)) for code in codes]
        for outcome in faults.run("TASK_QUEUE_ENABLE=1", chosen, seconds=10).outcomes:
            if outcome.function == "aclrtGetDeviceCount":
                print(outcome.seen.splitlines()[0])
        """,
    )
    seen = result.stdout.splitlines()
    assert len(seen) == len(FAULTY), result.stdout + result.stderr
    for line, (_, expected) in zip(seen, FAULTY.values(), strict=True):
        assert line == expected or line.startswith(expected) and "hangs" not in line, line


# One of each kind; `make faults` takes all.
SOME = "raw operators: (mse|.*loss_grad, )|modules: (MSE|Embedding)|optimizer: (plain|flat masters), step after 2"


USUAL = "TASK_QUEUE_ENABLE=1"
MODES = [pytest.param(mode, marks=[] if mode == USUAL else [pytest.mark.exhaustive]) for mode in faults.MODES]


@pytest.mark.parametrize("mode", MODES)
def test_no_state_is_lost_whichever_function_fails(mode):
    result = _run("-m", "tests.faults", "--mode", mode, "--every", "41", "--only", SOME, **faults.MODES[mode])
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_results_of_an_earlier_run_are_counted_with_current_causes(tmp_path):
    outcomes = [
        ["TASK_QUEUE_ENABLE=0", "modules", "MSELoss", "aclCreateTensor", 1, "one exception", "mse_loss_backward: ..."],
        ["TASK_QUEUE_ENABLE=1", "modules", "MSELoss", "aclCreateTensor", 1, f"one exception, {faults.ENDS}", "..."],
        ["TASK_QUEUE_ENABLE=1", "modules", "MSELoss", "aclCreateTensor", 2, "the process hangs", ""],
    ]
    told = tmp_path / "told.jsonl"
    told.write_text("\n".join(["a warning", *map(json.dumps, outcomes)]))
    report = faults.read_told("TASK_QUEUE_ENABLE=1", told)
    assert "| modules | 2 | 1 | 1 |" in str(report) and "ends the queue" in str(report)
    assert report.unexplained == ["modules, MSELoss, aclCreateTensor call 2: the process hangs ()"]
