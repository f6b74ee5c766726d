"""What fails on the device: where it is raised, what it says, and that nothing is left over."""

import os

from torch_aclnn_ops import ops

import host_npu
import pytest
import torch

from tests import test_ema_adam
from tests._contract import Maker
from tests.npu._operators import CONTRACTS, flat, meaning_of, to_npu

pytestmark = pytest.mark.simulator

IS_QUEUED = os.environ.get("TASK_QUEUE_ENABLE", "1") != "0" and os.environ.get("ASCEND_LAUNCH_BLOCKING") != "1"


def _calls():
    def call_contract(contract):
        arguments = to_npu(contract.SAMPLES[0].arguments(Maker(contract.CANN_DTYPES[0])))
        return [output.cpu() for output in flat(contract.OPERATOR.overload(*arguments))]

    def call_adam():
        tensors = {name: tensor.npu() for name, tensor in test_ema_adam.make_tensors(torch.float32).items()}
        ops.apply_fused_ema_adam_(**tensors, step=torch.tensor([7]).npu(), **test_ema_adam.OPTIONS)
        return [tensors[name].cpu() for name in test_ema_adam.STATE]

    calls = {contract.OPERATOR.name: lambda contract=contract: call_contract(contract) for contract in CONTRACTS}
    return {**calls, "apply_fused_ema_adam_": call_adam}


CALLS = _calls()


def cann_name(name):
    return getattr(ops, name).cann


@pytest.mark.parametrize("status", [161001, 161002, 361001, 561103])
@pytest.mark.parametrize("name", CALLS)
def test_a_phase_one_failure_is_raised_by_the_call_and_the_next_call_works(name, status):
    expected = CALLS[name]()
    host_npu.fail(f"{cann_name(name)}GetWorkspaceSize", status=status, message="EZ1001: asked for by a test")
    with pytest.raises(RuntimeError) as caught:
        CALLS[name]()
    assert str(caught.value).startswith(
        f"{cann_name(name)}: phase one refused the call ({cann_name(name)}GetWorkspaceSize returned {status},"
        f" {meaning_of(status)}).\nCANN says: "
    )
    assert "asked for by a test" in str(caught.value)
    for result, truth in zip(CALLS[name](), expected, strict=True):
        torch.testing.assert_close(result, truth)


def test_a_failure_without_a_cann_message_says_so():
    host_npu.fail("aclnnMseLossBackwardGetWorkspaceSize", status=161002, message="")
    with pytest.raises(RuntimeError, match=r"\nCANN (gives no reason\.|says: )"):
        CALLS["mse_loss_backward"]()


def test_an_out_of_memory_workspace_leaks_nothing():
    # The output finds room beside the gradient, the workspace has to be allocated. Phase two never runs, and the
    # executor of phase one is destroyed all the same.
    gradient, indices = torch.rand(6, 3).npu(), torch.tensor([0, 1, 2, 3, 1, 1]).npu()
    expected = ops.embedding_dense_backward(gradient, indices, 4, -1, True).cpu()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    for nth in range(1, 9):  # torch_npu tries again after it has freed what it can
        host_npu.fail("aclrtMallocAlign32", nth, status=207001, message="EL0004: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        ops.embedding_dense_backward(gradient, indices, 4, -1, True)
    host_npu.reset()
    assert torch.equal(ops.embedding_dense_backward(gradient, indices, 4, -1, True).cpu(), expected)


def test_an_out_of_memory_acl_tensor_raises():
    host_npu.fail("aclCreateTensor", status=1, message="EZ9999: asked for by a test")
    try:
        with pytest.raises(RuntimeError, match="aclCreateTensor made no tensor of Float"):
            CALLS["mse_loss_backward"]()
    finally:
        host_npu.reset()


@pytest.mark.skipif(IS_QUEUED, reason="with the queue on, torch_npu raises it at the next synchronisation")
@pytest.mark.parametrize("name", CALLS)
def test_a_failure_of_phase_two_without_the_queue_is_raised_by_the_call(name):
    expected = CALLS[name]()
    host_npu.fail(cann_name(name), status=361001, message="EZ9903: asked for by a test")
    with pytest.raises(
        RuntimeError, match=rf"^{cann_name(name)}: phase two failed \({cann_name(name)} returned 361001"
    ):
        CALLS[name]()
    for result, truth in zip(CALLS[name](), expected, strict=True):
        torch.testing.assert_close(result, truth)
