"""A backward pass through weights from before a step raises, as with torch.optim.AdamW."""

from torch_aclnn_ops import ops
from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from tests._optim import OPTIONS, each_dtype


def assert_step_is_noticed(weight, step):
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def optimizer(kind, weight):
    if kind == "torch":
        return torch.optim.AdamW([weight])
    return FusedEmaAdam([weight], flatten=kind == "flattened")


@each_dtype
@pytest.mark.parametrize("kind", ["torch", "one by one", "flattened"])
def test_a_step_is_noticed(kind, dtype):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    for _ in range(2):
        assert_step_is_noticed(weight, optimizer(kind, weight).step)


@each_dtype
@pytest.mark.parametrize("kind", ["torch", "one by one"])
def test_a_step_of_a_dtensor_is_noticed(kind, dtype, mesh_of_one):
    weight = nn.Parameter(distribute_tensor(torch.ones(3, dtype=dtype), mesh_of_one, [Replicate()]))
    for _ in range(2):
        assert_step_is_noticed(weight, optimizer(kind, weight).step)


def test_a_compiled_step_is_noticed():
    weight = nn.Parameter(torch.ones(3))
    step = torch.compile(FusedEmaAdam([weight]).step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_step_is_noticed(weight, step)


def by_function(grad, weight, states, average, step):
    fused_ema_adam([weight], [grad], *([state] for state in states), [average], [step], **OPTIONS)


def by_operator(grad, weight, states, average, step):
    ops.apply_fused_ema_adam_(grad, weight, *states, average, step.add_(1), 1e-2, 0.9, 0.9, 0.999, 1e-8, 1, True, 0.0)


@each_dtype
@pytest.mark.parametrize("call", [by_function, by_operator])
def test_a_call_without_an_optimizer_is_noticed(call, dtype):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    states = torch.zeros(2, 3, dtype=dtype).unbind()
    step = torch.no_grad()(lambda: call(weight.grad, weight, states, torch.ones(3, dtype=dtype), torch.tensor(0)))
    assert_step_is_noticed(weight, step)
