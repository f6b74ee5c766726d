"""``host_npu.testing`` runs functions in several processes."""

import os

import pytest
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
