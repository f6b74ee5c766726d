"""The doctor's checks on an NPU."""

from torch_aclnn_ops import doctor

import host_npu
import pytest


@pytest.mark.simulator
def test_an_operator_that_fails_is_wrong_and_the_others_are_right():
    host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=561103)
    [wrong] = [outcome for outcome in doctor.check() if not outcome.is_right]
    assert wrong.name == "mse_loss, torch.float32" and "561103" in wrong.detail
    assert all(outcome.is_right for outcome in doctor.check())
