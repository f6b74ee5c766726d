"""The doctor's checks on an NPU: refusals and launches too."""

from torch_aclnn_ops import doctor, ops

import host_npu
import pytest


def test_everything_is_right():
    outcomes = list(doctor.check())
    assert [outcome for outcome in outcomes if not outcome.is_right] == []
    assert {outcome.group for outcome in outcomes} == {"operator", "optimizer", "refusal", "launches"}


@pytest.mark.simulator
def test_an_operator_that_fails_is_wrong_and_the_others_are_right():
    host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=561103)
    wrong = [outcome for outcome in doctor.check() if not outcome.is_right]
    assert [outcome.name for outcome in wrong] == ["mse_loss, torch.float32"]
    assert "561103" in wrong[0].detail


def test_a_refusal_that_does_not_come_is_wrong(monkeypatch):
    monkeypatch.setattr(ops, "mse_loss_backward", lambda *_: None)
    wrong = {outcome.name: outcome.detail for outcome in doctor.check() if not outcome.is_right}
    assert wrong["float64"] == "AssertionError: the call was not refused"
