"""FusedEmaAdam on an NPU with failing functions: a swap loses nothing, and a step says to load a checkpoint."""

import itertools
import os

from torch_aclnn_ops.optim import FusedEmaAdam

import host_npu
import pytest
import torch
from torch import nn

from tests._failing_steps import FailOperators
from tests._optim import SETTINGS, Weights, assert_all_equal, contents_of, params_of, step_with

pytestmark = pytest.mark.simulator


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    """torch_npu leaks the aclTensors of its own operators if phase one fails, so aclTensors are not counted."""
    yield
    torch.npu.synchronize()
    host_npu.reset()


def trained(**options):
    weights = [nn.Parameter(torch.arange(3.0, device="npu") + i) for i in range(4)]
    optimizer = FusedEmaAdam(weights, lr=0.1, ema_decay=0.5, **options)
    step_with(optimizer)
    return weights, optimizer


def contents(optimizer):
    return [tensor.cpu() for tensor in contents_of(optimizer)]


@pytest.mark.skipif(
    os.environ.get("TASK_QUEUE_ENABLE") == "2", reason="there torch_npu queues the first phase, and the queue ends"
)
@pytest.mark.parametrize("nth", range(1, 9))  # 4 copies of weights and 4 of averages
def test_a_failed_copy_on_entering_a_swap_loses_nothing(nth):
    weights, optimizer = trained()
    before = contents(optimizer)
    host_npu.fail("aclnnInplaceCopyGetWorkspaceSize", nth)
    with pytest.raises(RuntimeError), optimizer.swap_ema_params():
        pytest.fail("the block must not run")
    assert_all_equal(contents(optimizer), before)
    with optimizer.swap_ema_params():
        for weight in weights:
            assert torch.equal(weight, optimizer.state[weight]["ema_params"])


@pytest.mark.parametrize("nth", [1, 3])
def test_a_failed_step_says_to_load_a_checkpoint(nth):
    _, optimizer = trained()
    host_npu.fail("aclnnApplyFusedEmaAdamGetWorkspaceSize", nth)
    with pytest.raises(RuntimeError, match="phase one refused") as caught:
        optimizer.step()
    assert "parameters may be partly updated; load a checkpoint" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("nth", [1, 3, 4])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"ema_warmup": "ratio"}], ids=str)
def test_a_step_that_cann_refuses_writes_nothing(nth, options):
    weights, optimizer = trained(**options)
    before = contents(optimizer)
    host_npu.fail("aclnnApplyFusedEmaAdamGetWorkspaceSize", nth)
    with pytest.raises(RuntimeError, match="phase one refused"):
        optimizer.step()
    assert_all_equal(contents(optimizer), before)
    assert [int(optimizer.state[weight]["step"]) for weight in weights] == [1] * 4


def test_an_invalid_tensor_in_a_list_raises_what_the_operator_raises_and_writes_nothing():
    weights, optimizer = trained()
    optimizer.state[weights[3]]["exp_avg"] = torch.zeros((), device="npu").expand_as(weights[3])
    before = contents(optimizer)
    with pytest.raises(RuntimeError, match="apply_fused_ema_adam_: "):
        optimizer.step()
    assert_all_equal(contents(optimizer), before)


def _not_flattened(optimizer):
    return [param.numel() for param in optimizer._flat_groups[0].rest]


@pytest.mark.parametrize("has_new_param", [False, True], ids=["first step", "step with a new parameter"])
@pytest.mark.every_nth_case(4)
def test_the_next_step_creates_the_buffers_after_any_failure(has_new_param):
    def start():
        models = Weights(torch.float32).npu(), Weights(torch.bfloat16).npu()
        first, *others = [param for model in models for param in model.parameters()]
        optimizer = FusedEmaAdam(others, **SETTINGS, flatten=True)
        if has_new_param:
            step_with(optimizer)
        optimizer.param_groups[0]["params"].append(first)
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        return optimizer

    expected = start()
    expected.step()
    compared = 0
    for nth in itertools.count():
        optimizer = start()
        disturbance, is_partly_updated = FailOperators(nth, 1), False
        try:
            disturbance.run(optimizer.step)
        except RuntimeError as error:
            is_partly_updated = "load a checkpoint" in "".join(getattr(error, "__notes__", ()))
        if len(disturbance.seen) <= nth:
            break
        optimizer.step()
        assert _not_flattened(optimizer) == _not_flattened(expected), (nth, disturbance.seen[nth])
        compared += not is_partly_updated
        assert is_partly_updated or all(map(torch.equal, params_of(optimizer), params_of(expected)))
    assert nth > 50 and compared > 20
