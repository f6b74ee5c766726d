"""Averages of buffers by FusedEmaAdam(ema_buffers=...) on an NPU."""

import copy
import os

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import each_flatten

DECAY = 0.9


def pair(dtype, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(dtype)
    models = [copy.deepcopy(model).to("npu"), model]
    return models, [FusedEmaAdam(one.parameters(), ema_decay=DECAY, ema_buffers=one, **options) for one in models]


def assert_same_averages(optimizers):
    npu, cpu = (optimizer.state_dict()["ema_buffers"] for optimizer in optimizers)
    torch.testing.assert_close({name: one.cpu() for name, one in npu.items()}, cpu, rtol=1e-5, atol=1e-6)
    assert len(cpu) == 2


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_a_cpu(flatten, dtype):
    models, optimizers = pair(dtype, flatten=flatten, ema_warmup="ratio")
    for seed in range(4):
        values = torch.rand(8, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for model, optimizer in zip(models, optimizers, strict=True):
            model[1].running_mean.copy_(values)
            model[0].weight.grad = torch.ones_like(model[0].weight)
            optimizer.step()
    assert_same_averages(optimizers)
    weights = models[0][1].running_mean.clone()
    with optimizers[0].swap_ema_params():
        assert not torch.equal(models[0][1].running_mean, weights)
    assert torch.equal(models[0][1].running_mean, weights)


def test_a_step_that_the_device_skips_does_not_update_them():
    [model, _], [optimizer, _] = pair(torch.float32)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    before = {name: one.clone() for name, one in optimizer.state_dict()["ema_buffers"].items()}
    model[1].running_mean.fill_(3)
    optimizer.found_inf = torch.ones((), device="npu")
    optimizer.grad_scale = torch.ones((), device="npu")
    optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["ema_buffers"], before, rtol=0, atol=0)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 captures in another way")
@pytest.mark.skipif(os.environ.get("TASK_QUEUE_ENABLE") == "2", reason="torch_npu captures nothing with this queue")
def test_a_captured_step_updates_them():
    [model, _], [optimizer, _] = pair(torch.float32)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        optimizer.step()
    average = optimizer.state_dict()["ema_buffers"]["1.running_mean"]
    average.fill_(0)
    model[1].running_mean.fill_(1)
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(average.cpu(), torch.full((8,), 1 - DECAY**3))
    torch.npu.set_stream(torch.npu.default_stream())
