"""FusedEmaAdam and memory that a program reads and writes itself: weights, gradients, states and step counts."""

import copy

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import SETTINGS, assert_all_close, assert_all_equal, states_of

WRITES = {
    "new data": lambda state, value: setattr(state, "data", value.clone()),
    "a copy to data": lambda state, value: state.data.copy_(value),
    "a copy": lambda state, value: state.copy_(value),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("write", "flatten"),
    [
        (write, flatten)
        for name, write in WRITES.items()
        for flatten in ([False] if name == "new data" else [False, True])
    ],
)
def test_states_that_a_program_restores_are_used(write, dtype, flatten):
    gradients = [torch.full((4, 4), value, dtype=dtype) for value in (1.0, -2.0)]

    def step(weights, optimizer, count):
        for _ in range(count):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            optimizer.step()

    results = []
    for is_restored in (True, False):
        weights = [nn.Parameter((torch.linspace(-1, 1, 16).reshape(4, 4) + i).to(dtype)) for i in range(2)]
        optimizer = FusedEmaAdam(weights, **SETTINGS, ema_warmup="ratio", flatten=flatten and is_restored)
        step(weights, optimizer, 2)
        if is_restored:
            saved = copy.deepcopy([(weight.detach(), optimizer.state[weight]) for weight in weights])
            step(weights, optimizer, 3)
            for weight, (value, state) in zip(weights, saved, strict=True):
                weight.data.copy_(value)
                for name, tensor in optimizer.state[weight].items():
                    write(tensor, state[name])
        step(weights, optimizer, 2)
        results.append([weight.detach().clone() for weight in weights] + states_of(optimizer))
        with optimizer.swap_ema_params():
            results[-1] += [weight.detach().clone() for weight in weights]
    assert_all_close(*results, 1e-6)


def test_a_step_in_inference_mode_is_refused():
    weight = nn.Parameter(torch.ones(2))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="step: must not be called in inference mode"):
        FusedEmaAdam([weight]).step()


def test_a_model_that_inference_mode_converts_inside_a_swap_can_be_trained_after_it():
    model = nn.Linear(4, 2)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    with torch.inference_mode(), optimizer.swap_ema_params():
        model.half()(torch.ones(1, 4).half())
    assert_all_equal([model.weight.detach()], [before])
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight.detach(), before)
