"""Any CANN function may fail, and no state is lost."""

import pytest

from tests import faults
from tests._children import run_python

# One of each kind; `python -m host_npu -m tests.faults MODE` takes all.
SOME = "raw operators: (mse|.*loss_grad, )|modules: (MSE|Embedding)|optimizer: (plain|flat masters), step after 2"
USUAL = "TASK_QUEUE_ENABLE=1"
MODES = [pytest.param(mode, marks=[] if mode == USUAL else [pytest.mark.exhaustive]) for mode in faults.MODES]


@pytest.mark.parametrize("mode", MODES)
def test_no_state_is_lost_whichever_function_fails(mode):
    program = ("-m", "host_npu", "-m", "tests.faults")
    result = run_python(*program, mode, "--every", "41", "--only", SOME, **faults.MODES[mode])
    assert result.returncode == 0, result.stdout + result.stderr
