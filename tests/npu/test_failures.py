"""Failures on the device: where they are raised, their messages, and that nothing is left over."""

import os

from torch_aclnn_ops import doctor, ops

import host_npu
import pytest
import torch

from tests import test_ema_adam
from tests._children import run_python
from tests.npu._operators import CONTRACTS, flat, good_arguments, run_adam, to_npu

pytestmark = pytest.mark.simulator

IS_QUEUED = os.environ.get("TASK_QUEUE_ENABLE", "1") != "0" and os.environ.get("ASCEND_LAUNCH_BLOCKING") != "1"


def _calls():
    def call_contract(contract):
        return [output.cpu() for output in flat(contract.OPERATOR.overload(*to_npu(good_arguments(contract))))]

    def call_adam():
        tensors = run_adam(test_ema_adam.make_tensors(torch.float32))
        return [tensors[name].cpu() for name in test_ema_adam.STATE]

    calls = {contract.OPERATOR.name: lambda contract=contract: call_contract(contract) for contract in CONTRACTS}
    return {**calls, "apply_fused_ema_adam_": call_adam}


CALLS = _calls()


def cann_name(name):
    return getattr(ops, name).cann


@pytest.mark.parametrize("name", CALLS)
def test_whichever_call_of_cann_fails_is_raised_and_the_next_call_is_right(name):
    expected = CALLS[name]()
    host_npu.count_calls()
    CALLS[name]()
    torch.npu.synchronize()
    number = host_npu.stats().calls["aclCreateTensor"]
    phases = [f"{cann_name(name)}GetWorkspaceSize"]
    if not IS_QUEUED:  # with the queue, torch_npu raises a failure of phase two at the next synchronisation
        phases.append(cann_name(name))
    for function, nth in [*(("aclCreateTensor", nth + 1) for nth in range(number)), *((phase, 1) for phase in phases)]:
        host_npu.fail(function, nth, status=361001, message="EZ9903: asked for by a test")
        with pytest.raises(RuntimeError, match=cann_name(name) if function != "aclCreateTensor" else function):
            CALLS[name]()
        host_npu.reset()
        torch.testing.assert_close(CALLS[name](), expected)


@pytest.mark.parametrize(
    ("message", "said"),
    [("EZ1001: asked for by a test", "CANN says: .*asked for by a test"), ("", r"CANN (gives no reason\.|says: )")],
)
def test_a_phase_one_failure_says_what_cann_says(message, said):
    host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=161002, message=message)
    with pytest.raises(RuntimeError, match=rf"returned 161002, .*\)\.\n{said}"):
        CALLS["mse_loss_backward"]()


def test_an_out_of_memory_workspace_leaks_nothing():
    # There is memory for the output, but not for the workspace. Phase two never runs; the executor must be destroyed.
    gradient, indices = torch.rand(6, 3).npu(), torch.tensor([0, 1, 2, 3, 1, 1]).npu()
    expected = ops.embedding_dense_backward(gradient, indices, 4, -1, True).cpu()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    for nth in range(1, 9):  # torch_npu retries after freeing its cache
        host_npu.fail("aclrtMallocAlign32", nth, status=207001, message="EL0004: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        ops.embedding_dense_backward(gradient, indices, 4, -1, True)
    host_npu.reset()
    assert torch.equal(ops.embedding_dense_backward(gradient, indices, 4, -1, True).cpu(), expected)


def test_the_doctor_says_that_an_operator_that_fails_is_wrong_and_the_others_are_right():
    host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=561103)
    [wrong] = [outcome for outcome in doctor.check() if not outcome.is_right]
    assert wrong.name == "mse_loss, torch.float32" and "561103" in wrong.detail
    assert all(outcome.is_right for outcome in doctor.check())


def test_the_doctor_finds_all_right_with_the_dtypes_that_a_device_takes():
    result = run_python("-m", "host_npu", "-m", "torch_aclnn_ops.doctor", "--check", HOST_NPU_DTYPES="cann")
    assert result.returncode == 0, result.stdout
