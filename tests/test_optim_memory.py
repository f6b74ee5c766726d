"""FusedEmaAdam: parameters that share memory, that are replaced, or whose shape differs from their states'."""

import copy
import re

from torch_aclnn_ops.optim import FusedEmaAdam
from torch_aclnn_ops.optim.memory import check_no_shared_memory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests._optim import (
    SETTINGS,
    Weights,
    assert_all_close,
    assert_all_equal,
    averages_of,
    each_flatten,
    step_with,
    train,
    unchanged,
)

each_storage = pytest.mark.parametrize(
    ("dtype", "master_weights"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
    ids=["float32", "bfloat16 with masters", "bfloat16"],
)


# Views of a matrix; random views are below.
SHARED = {
    "another dtype": (lambda x: x[1:], lambda x: x.view(torch.bfloat16)[:2, 1:]),
    "by DLPack": (lambda x: x, lambda x: torch.from_dlpack(x[1:2])),
}
DISJOINT = {
    "query, key and value": (lambda x: x[:2], lambda x: x[2:4], lambda x: x[4:]),
    "every other column": (lambda x: x[:, ::2], lambda x: x[:, 1::2]),
    "empty ones": (lambda x: x, lambda x: x[:0], lambda x: x[:, :0]),
    "by DLPack": (lambda x: x[:, :2], lambda x: torch.from_dlpack(x[:, 2:])),
}


@each_flatten
@pytest.mark.parametrize("views", SHARED.values(), ids=SHARED)
def test_parameters_that_share_memory_raise(views, flatten):
    buffer = torch.zeros(6, 6)
    sentence = r"parameter 0 of group 0 and parameter 1 of group 0 share memory.*b\.weight ="
    with pytest.raises(ValueError, match=sentence):
        FusedEmaAdam([nn.Parameter(view(buffer)) for view in views], flatten=flatten)


@each_flatten
@pytest.mark.parametrize("views", DISJOINT.values(), ids=DISJOINT)
def test_disjoint_views_of_one_buffer_are_trained_in_place(views, flatten):
    buffer = torch.zeros(6, 6)
    params = [nn.Parameter(view(buffer)) for view in views]
    optimizer = FusedEmaAdam(params, lr=0.5, weight_decay=0.0, flatten=flatten)
    step_with(optimizer)
    for param in params:
        assert_all_close([param.detach().float()], [torch.full(param.shape, -0.5)], 1e-2)


def test_a_parameter_that_is_listed_twice_is_updated_once_with_torchs_warning():
    named = [("first", nn.Parameter(torch.ones(4))), ("second", nn.Parameter(torch.ones(4)))]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = FusedEmaAdam([*named, named[0]], **SETTINGS)
    step_with(optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["first", "second"]
    assert_all_equal([named[0][1].detach()], [named[1][1].detach()])


def test_the_error_names_parameters_that_share_memory_and_leaves_the_optimizer_unchanged():
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    second.data = first.data[1:]
    optimizer = FusedEmaAdam([("embedding.weight", first)])
    with pytest.raises(ValueError, match="parameter 'embedding.weight' and parameter 'head.weight' share memory"):
        optimizer.add_param_group({"params": [("head.weight", second)]})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]


@each_flatten
@each_storage
def test_parameters_tied_by_data_between_two_steps_raise_before_anything_is_written(dtype, master_weights, flatten):
    model = Weights(dtype)
    groups = [{"params": [param]} for param in model.parameters()]
    optimizer = FusedEmaAdam(groups, flatten=flatten, master_weights=master_weights, **SETTINGS)
    train(model, optimizer, range(2))
    params = list(model.parameters())
    params[5].data = params[0].data.reshape(3, 4).T
    model.set_gradients(2)
    sentence = "parameter 0 of group 0 and parameter 0 of group 5 share memory"
    for refused in (optimizer.step, optimizer.swap_ema_params().__enter__):
        with unchanged(optimizer), pytest.raises(ValueError, match=sentence):
            refused()
    params[5].data = params[5].data.clone()
    optimizer.step()
    assert {int(optimizer.state[param]["step"]) for param in params} == {3}


LOADED = {
    "exp_avg of parameter 1 of group 0 and exp_avg_sq": lambda state, _: {**state, "exp_avg_sq": state["exp_avg"]},
    "the data of parameter 1 of group 0 and ema_params": lambda state, weight: {**state, "ema_params": weight.detach()},
}


@pytest.mark.parametrize(("sentence", "change"), LOADED.items(), ids=["moments", "averages that are the weights"])
def test_loaded_states_that_share_memory_raise_before_anything_is_written(sentence, change):
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedEmaAdam(weights)
    step_with(optimizer)
    contents = optimizer.state_dict()
    optimizer.load_state_dict({**contents, "state": {**contents["state"], 1: change(contents["state"][1], weights[1])}})
    with (
        unchanged(optimizer),
        pytest.raises(ValueError, match=f"{sentence} of parameter 1 of group 0 share memory.*clones"),
    ):
        step_with(optimizer)
    optimizer.load_state_dict(copy.deepcopy(contents))
    step_with(optimizer)


@pytest.mark.parametrize("name", ["exp_avg", "ema_params"])
def test_states_that_two_groups_share_raise(name):
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedEmaAdam([{"params": [weight]} for weight in weights])
    step_with(optimizer)
    optimizer.state[weights[1]][name] = optimizer.state[weights[0]][name]
    for _ in range(2):
        with unchanged(optimizer), pytest.raises(ValueError, match=f"{name} of parameter 0 of group 1 share memory"):
            step_with(optimizer)


class Scaled(nn.Parameter):
    """A subclass with its own memory."""


WITHOUT_ADDRESS = {
    "meta tensors": lambda: [nn.Parameter(torch.ones(3, device="meta")) for _ in range(2)],
    "lazy parameters": lambda: list(nn.LazyLinear(3).parameters()),
    "sparse tensors": lambda: [nn.Parameter(torch.eye(3).to_sparse()) for _ in range(2)],
    "subclasses": lambda: [Scaled(torch.ones(3)) for _ in range(2)],
}


@pytest.mark.parametrize("make", WITHOUT_ADDRESS.values(), ids=WITHOUT_ADDRESS)
def test_parameters_without_an_address_are_supported(make):
    FusedEmaAdam(make()).step()


def test_fake_parameters_are_supported():
    with FakeTensorMode():
        FusedEmaAdam([nn.Parameter(torch.ones(3)) for _ in range(2)]).step()


def test_a_subclass_that_shares_memory_raises():
    data = torch.ones(3)
    with pytest.raises(ValueError, match="share memory"):
        FusedEmaAdam([Scaled(data), nn.Parameter(data)])


views = st.tuples(
    st.integers(0, 20), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3), st.sampled_from([1, 2])
)


@given(first=views, second=views)
def test_parameters_share_memory_if_and_only_if_an_element_overlaps(first, second):
    buffer = torch.zeros(200)
    tensors, addresses = [], []
    for offset, dimensions, units in (first, second):
        of_dtype = buffer if units == 2 else buffer.view(torch.bfloat16)
        shape, stride = [size for size, _ in dimensions], [step for _, step in dimensions]
        tensors.append(of_dtype.as_strided(shape, stride, offset))
        places = {offset}
        for size, step in dimensions:
            places = {place + i * step for place in places for i in range(size)}
        addresses.append({place * units + unit for place in places for unit in range(units)})
    groups = [{"params": tensors}]
    if addresses[0] & addresses[1]:
        with pytest.raises(ValueError, match="share memory"):
            check_no_shared_memory(groups)
    else:
        check_no_shared_memory(groups)


RESHAPED = {
    "grown": lambda data: data.new_ones(100_000, 2),
    "shrunk in place": lambda data: data[:32],
    "transposed": lambda data: data.T,
}


@each_flatten
@each_storage
@pytest.mark.parametrize("reshape", RESHAPED.values(), ids=RESHAPED)
def test_a_resized_parameter_raises_before_anything_is_written(reshape, dtype, master_weights, flatten):
    first, second = (nn.Parameter(torch.ones(64, 2, dtype=dtype)) for _ in range(2))
    groups = [{"params": [("first", first)]}, {"params": [("second", second)]}]
    optimizer = FusedEmaAdam(groups, flatten=flatten, master_weights=master_weights, **SETTINGS)
    step_with(optimizer)
    second.data = reshape(second.data)
    second.grad = torch.ones_like(second)
    shape = re.escape(str(list(second.shape)))
    sentence = rf"'exp_avg' must have the shape {shape} of parameter 'second', but it has \[64, 2\]"
    for call in (optimizer.step, optimizer.reset_ema_params, optimizer.swap_ema_params().__enter__):
        with unchanged(optimizer), pytest.raises(RuntimeError, match=sentence):
            call()
    del optimizer.state[second]
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in (first, second)] == [2, 1]
    assert optimizer.state[second]["exp_avg"].shape == second.shape


@each_flatten
def test_states_that_are_all_deleted_start_again_in_every_group(flatten):
    weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizer = FusedEmaAdam([{"params": [weight]} for weight in weights], flatten=flatten, **SETTINGS)
    step_with(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # so that all states exist when a group's are cached
    step_with(optimizer)
    optimizer.state.clear()
    step_with(optimizer)
    assert [int(optimizer.state[weight]["step"]) for weight in weights] == [1, 1]


@each_flatten
@pytest.mark.parametrize("steps", [0, 1])
def test_a_gradient_of_another_shape_raises(steps, flatten):
    weight = nn.Parameter(torch.ones(4))
    optimizer = FusedEmaAdam([weight], flatten=flatten)
    weight.grad = torch.ones(4)
    for _ in range(steps):
        optimizer.step()
        del optimizer.state[weight]
    weight.data = torch.ones(1000)
    with pytest.raises(RuntimeError, match=r"gradient must have the shape \[1000\] .* but it has \[4\]"):
        optimizer.step()


@each_flatten
def test_a_parameter_whose_storage_was_freed_raises(flatten):
    weight = nn.Parameter(torch.ones(4))
    optimizer = FusedEmaAdam([weight], flatten=flatten)
    step_with(optimizer)
    weight.data = torch.ones(4)
    weight.untyped_storage().resize_(0)
    sentence = (
        r"needs 16 bytes for its shape \[4\], but its storage has 0; restore its storage before the step. With FSDP2,"
        r" create the optimizer after fully_shard\(\) and before the first forward pass"
    )
    with pytest.raises(RuntimeError, match=sentence):
        optimizer.step()


REPLACED = {
    "a copy": lambda data: data.clone() * 2,
    "a layout": lambda data: (data * 2).to(memory_format=torch.channels_last),
    "a part of a buffer": lambda data: torch.stack([data * 2, data])[0],
}


@each_flatten
@each_storage
@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_data_of_the_same_shape_may_be_replaced(replace, dtype, master_weights, flatten):
    # Like a write to the parameter.
    results = []
    for is_replaced in (True, False):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(2, 3, 4, 5, generator=generator).to(dtype)) for _ in range(2)]
        optimizer = FusedEmaAdam(weights, flatten=flatten, master_weights=master_weights, **SETTINGS)
        for step in range(4):
            if step == 2:
                data = replace(weights[0].data)
                if is_replaced:
                    weights[0].data = data
                else:
                    with torch.no_grad():
                        weights[0].copy_(data)
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
            optimizer.step()
        model = nn.ParameterList(weights)
        results.append([*(weight.detach() for weight in weights), *averages_of(model, optimizer)])
    assert_all_close(*results, 1e-6 if dtype == torch.float32 or master_weights else 1e-2)


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
