"""FusedEmaAdam: calls inside a swap, in the closure of a step, in threads, and between a loss and its gradient."""

import copy
from concurrent.futures import ThreadPoolExecutor

from torch_aclnn_ops import ops
from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from tests._optim import OPTIONS, SETTINGS, assert_all_equal, assert_same, contents_of, each_dtype, step_with


def trained():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    for _ in range(2):
        step_with(optimizer)
    return model, optimizer


def in_a_thread(call):
    """Return the exception of a call in another thread, after its end."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception()


CALLS = {
    "step": lambda model, optimizer: optimizer.step(),
    "swap_ema_params": lambda model, optimizer: optimizer.swap_ema_params().__enter__(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict({}),
    "reset_ema_params": lambda model, optimizer: optimizer.reset_ema_params(),
    "ema_state_dict": lambda model, optimizer: optimizer.ema_state_dict(model),
    "save_ema_model": lambda model, optimizer: optimizer.save_ema_model(model, "/nowhere/ema.pt"),
    "__getstate__": lambda model, optimizer: copy.deepcopy(optimizer),
}
TO_SAVE = {name: CALLS[name] for name in ("state_dict", "reset_ema_params", "ema_state_dict", "__getstate__")}


@pytest.mark.parametrize("in_another_thread", [False, True], ids=["here", "in another thread"])
@pytest.mark.parametrize("name", CALLS)
def test_inside_a_swap_it_raises_and_changes_nothing(name, in_another_thread):
    model, optimizer = trained()
    before = contents_of(optimizer)

    def call():
        with pytest.raises(RuntimeError, match=rf"^FusedEmaAdam\.{name}: inside swap_ema_params\(\) the parameters"):
            CALLS[name](model, optimizer)

    with optimizer.swap_ema_params():
        assert in_a_thread(call) is None if in_another_thread else call() is None
    assert_all_equal(contents_of(optimizer), before)


@pytest.mark.parametrize("call", TO_SAVE.values(), ids=TO_SAVE)
def test_a_closure_may_read_and_save_states(call):
    model, optimizer = trained()
    optimizer.step(lambda: call(model, optimizer) and 0.0)
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_a_closure_may_swap_the_averages_in_and_out():
    # As a training step does whose targets come from the averaged model.
    (model, optimizer), (other, expected) = trained(), trained()

    def closure():
        with optimizer.swap_ema_params():
            shown.append(model.weight.detach().clone())
        return 0.0

    shown = []
    optimizer.step(closure)
    assert_all_equal(shown, [expected.state[other.weight]["ema_params"]])
    expected.step()
    assert_same(optimizer, expected)


def test_a_step_whose_closure_leaves_a_swap_open_raises_before_anything_is_written():
    model, optimizer = trained()
    before = contents_of(optimizer)
    swap = optimizer.swap_ema_params()
    with pytest.raises(RuntimeError, match=r"FusedEmaAdam\.step: inside swap_ema_params\(\)"):
        optimizer.step(swap.__enter__)
    swap.__exit__(None, None, None)
    assert_all_equal(contents_of(optimizer), before)
    optimizer.step()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_step_inside_a_swap_raises(fullgraph):
    model, optimizer = trained()
    step = torch.compile(optimizer.step, fullgraph=fullgraph, backend="eager")
    step()
    before = contents_of(optimizer)
    with optimizer.swap_ema_params():
        with pytest.raises(RuntimeError, match="Observed exception" if fullgraph else "leave the with block first"):
            step()
    assert_all_equal(contents_of(optimizer), before)
    step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


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
