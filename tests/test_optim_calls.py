"""FusedEmaAdam: calls in a swap, in a step's closure, in threads, before a gradient, and of fused_ema_adam."""

import copy
from concurrent.futures import ThreadPoolExecutor

from torch_aclnn_ops import ops
from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from tests._optim import (
    OPTIONS,
    SETTINGS,
    Weights,
    assert_all_equal,
    assert_same,
    averages_of,
    each_dtype,
    trained,
    unchanged,
    weights_of,
)


def in_a_thread(call):
    """Return the exception of a call in another thread, after it has ended."""
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

    def call():
        with pytest.raises(RuntimeError, match=rf"^FusedEmaAdam\.{name}: inside swap_ema_params\(\) the parameters"):
            CALLS[name](model, optimizer)

    with unchanged(optimizer), optimizer.swap_ema_params():
        assert in_a_thread(call) is None if in_another_thread else call() is None


@pytest.mark.parametrize("call", TO_SAVE.values(), ids=TO_SAVE)
def test_a_closure_may_read_and_save_states(call):
    model, optimizer = trained()
    optimizer.step(lambda: call(model, optimizer) and 0.0)
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def test_a_closure_may_swap_the_averages_in_and_out():
    # Like a training step whose targets come from the averaged model.
    (model, optimizer), (other, expected) = trained(), trained()

    def closure():
        with optimizer.swap_ema_params():
            shown.extend(weights_of(model))
        return 0.0

    shown = []
    optimizer.step(closure)
    assert_all_equal(shown, averages_of(other, expected))
    expected.step()
    assert_same(optimizer, expected)


def test_a_step_whose_closure_leaves_a_swap_open_raises_before_anything_is_written():
    model, optimizer = trained()
    swap = optimizer.swap_ema_params()
    with unchanged(optimizer):
        with pytest.raises(RuntimeError, match=r"FusedEmaAdam\.step: inside swap_ema_params\(\)"):
            optimizer.step(swap.__enter__)
        swap.__exit__(None, None, None)
    optimizer.step()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_step_inside_a_swap_raises(fullgraph):
    model, optimizer = trained()
    step = torch.compile(optimizer.step, fullgraph=fullgraph, backend="eager")
    step()
    sentence = "Observed exception" if fullgraph else "leave the with block first"
    with unchanged(optimizer), optimizer.swap_ema_params(), pytest.raises(RuntimeError, match=sentence):
        step()
    step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {5}


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
@pytest.mark.parametrize("is_dtensor", [False, True])
@pytest.mark.parametrize("kind", ["torch", "one by one", "flattened"])
def test_a_step_is_noticed(kind, is_dtensor, dtype, mesh_of_one):
    values = torch.ones(3, dtype=dtype)
    weight = nn.Parameter(distribute_tensor(values, mesh_of_one, [Replicate()]) if is_dtensor else values)
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


LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "ema_params", "steps")


def make_lists(dtype=torch.float32):
    weights = [weight.detach().clone() for weight in Weights(dtype).parameters()]
    lists = {
        "params": weights,
        "grads": [weight / 2 for weight in weights],
        "exp_avgs": [torch.zeros_like(weight) for weight in weights],
        "exp_avg_sqs": [torch.zeros_like(weight) for weight in weights],
        "ema_params": [weight.clone() for weight in weights],
        "steps": [torch.tensor(0) for _ in weights],
    }
    assert tuple(lists) == LISTS
    return lists


@each_dtype
def test_the_function_equals_the_step_of_the_class(dtype):
    model = Weights(dtype)
    for weight in model.parameters():
        weight.grad = weight.detach() / 2
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS, master_weights=False)
    lists = make_lists(dtype)
    for _ in range(3):
        optimizer.step()
        fused_ema_adam(**lists, **OPTIONS)
    assert_all_equal(lists["params"], weights_of(model))
    assert_all_equal(lists["ema_params"], averages_of(model, optimizer))
    assert all(step == 3 for step in lists["steps"])


def test_the_function_accepts_parameters_that_require_grad():
    lists = make_lists()
    lists["params"] = [nn.Parameter(weight) for weight in lists["params"]]
    fused_ema_adam(**lists, **OPTIONS)
    assert all(weight.grad_fn is None for weight in lists["params"])


def test_the_function_accepts_empty_lists():
    fused_ema_adam([], [], [], [], [], [], **OPTIONS)


def test_the_function_accepts_a_parameter_list():
    lists, others = make_lists(), make_lists()
    fused_ema_adam(**lists, **OPTIONS)
    parameters = nn.ParameterList(others["params"])
    fused_ema_adam(**{**others, "params": parameters}, **OPTIONS)
    assert_all_equal(list(parameters), lists["params"])


@pytest.mark.parametrize("name", LISTS)
def test_the_function_names_what_is_no_tensor(name):
    lists = make_lists()
    for listed in (None, set(lists[name]), torch.ones(len(lists[name]))):
        with pytest.raises(TypeError, match=f"^fused_ema_adam: {name} must be a list of tensors, but it is "):
            fused_ema_adam(**{**lists, name: listed}, **OPTIONS)
    lists[name][3] = None
    with pytest.raises(TypeError, match=rf"^fused_ema_adam: {name}\[3\] must be a Tensor, but it is None$"):
        fused_ema_adam(**lists, **OPTIONS)


BAD_TENSORS = {
    **{
        f"{name} has another {kind}": (name, tensor, rf"{name}\[3\] must be torch\.float32 \[5\] on cpu, as its")
        for name in LISTS[1:-1]
        for kind, tensor in (
            ("dtype", torch.zeros(5, dtype=torch.float64)),
            ("shape", torch.zeros(6)),
            ("device", torch.zeros(5, device="meta")),
        )
    },
    "sparse gradient": ("grads", torch.ones(5).to_sparse(), r"grads\[3\] must be dense, but it is torch\.sparse_coo"),
    "complex weights": ("params", torch.ones(5) * 1j, r"params\[3\] must have a real dtype of 16, 32 or 64 bits, but"),
    **{
        f"{kind} step": ("steps", step, r"steps\[3\] must be a torch\.int64 tensor .* on cpu, like its parameter, but")
        for kind, step in (
            ("float", torch.tensor(0.0)),
            ("no", torch.zeros(0, dtype=torch.int64)),
            ("two-element", torch.zeros(2, dtype=torch.int64)),
            ("meta", torch.zeros((), dtype=torch.int64, device="meta")),
        )
    },
}


@pytest.mark.parametrize("name, tensor, sentence", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_the_function_raises_and_changes_nothing(name, tensor, sentence):
    lists, before = make_lists(), make_lists()
    lists[name][3] = tensor
    with pytest.raises(ValueError, match=f"^fused_ema_adam: {sentence}"):
        fused_ema_adam(**lists, **OPTIONS)
    lists[name][3] = before[name][3]
    for one in LISTS:
        assert_all_equal(lists[one], before[one])


SHARED = {(one, other): {} for one in LISTS[:-1] for other in LISTS[:-1] if {one, other} != {"grads"}}
SHARED |= {("grads", "grads"): {"grad_scale": torch.ones(1)}, ("steps", "steps"): {}}


@pytest.mark.parametrize("one, other", SHARED)
def test_the_function_raises_for_tensors_that_share_memory_and_changes_nothing(one, other):
    lists, before = make_lists(), make_lists()
    lists[other][5] = lists[one][0]
    with pytest.raises(RuntimeError, match=r"^fused_ema_adam: \w+\[.\] and \w+\[.\] must not share memory, because"):
        fused_ema_adam(**lists, **OPTIONS, **SHARED[one, other])
    lists[other][5] = before[other][5]
    for name in LISTS:
        assert_all_equal(lists[name], before[name])


def test_the_function_takes_one_gradient_for_several_parameters():
    weights, others = torch.zeros(2, 3).unbind(), torch.zeros(2, 3).unbind()
    same, equal = [torch.ones(()).expand(3)] * 2, [torch.ones(3), torch.ones(3)]
    for params, grads in ((weights, same), (others, equal)):
        states = [torch.zeros(2, 3).unbind() for _ in range(3)]
        fused_ema_adam(params, grads, *states, [torch.tensor(0), torch.tensor(0)], **OPTIONS)
    assert_all_equal(weights, others)


@pytest.mark.parametrize("name", LISTS[1:])
def test_the_function_raises_for_lists_of_different_lengths(name):
    lists = make_lists()
    lists[name].pop()
    with pytest.raises(ValueError, match=f"^fused_ema_adam: {name} has 5 tensors, but params has 6$"):
        fused_ema_adam(**lists, **OPTIONS)


@pytest.mark.parametrize("name, value", {"lr": -1.0, "beta1": 1.0, "beta2": -0.5, "ema_decay": 2.0, "eps": -1}.items())
def test_the_function_raises_for_an_option_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, but it is {value}"):
        fused_ema_adam(**make_lists(), **{**OPTIONS, name: value})


@pytest.mark.parametrize("name, value", [("grad_scale", 2.0), ("found_inf", torch.zeros(2))])
def test_the_function_raises_for_a_grad_scale_that_is_not_a_one_element_tensor(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a tensor with one element or None, but it is"):
        fused_ema_adam(**make_lists(), **OPTIONS, **{name: value})
