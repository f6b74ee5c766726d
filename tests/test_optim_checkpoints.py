"""FusedEmaAdam: checkpoints, and the exchange of weights and averages."""

from __future__ import annotations

import copy
import io
import pickle

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests import _optim
from tests._failing_steps import Failed, FailOperators
from tests._optim import (
    GROUP_OPTIONS,
    SETTINGS,
    Weights,
    assert_all_equal,
    averages_of,
    each_dtype,
    states_of,
    train,
    weights_of,
)


def _through_a_file(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    model, optimizer = _fresh(next(model.parameters()).dtype)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


def _fresh(dtype):
    model = Weights(dtype, seed=1)
    return model, FusedEmaAdam(model.parameters(), lr=0.5)


WAYS = {
    "state_dict through a file": _through_a_file,
    "pickle": lambda *both: pickle.loads(pickle.dumps(both)),
    "deepcopy": lambda *both: copy.deepcopy(both),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_dtype
def test_training_resumes_bit_for_bit_after(way, dtype):
    model = Weights(dtype)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS, weight_decay=0.1, betas=(0.8, 0.99))
    train(model, optimizer, range(5))
    resumed_model, resumed_optimizer = way(model, optimizer)
    train(model, optimizer, range(5, 10))
    train(resumed_model, resumed_optimizer, range(5, 10))
    assert_all_equal(weights_of(resumed_model), weights_of(model))
    assert_all_equal(states_of(resumed_optimizer), states_of(optimizer))


@each_dtype
def test_loading_a_state_dict_gives_that_state_dict(dtype):
    model = Weights(dtype)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    _, loaded_optimizer = _fresh(dtype)
    loaded_optimizer.load_state_dict(saved)
    loaded = loaded_optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    assert {key: list(state) for key, state in loaded["state"].items()} == {
        key: list(state) for key, state in saved["state"].items()
    }
    assert_all_equal(states_of(loaded_optimizer), states_of(optimizer))


@pytest.mark.parametrize("name", GROUP_OPTIONS)
def test_an_option_missing_in_a_checkpoint_is_unchanged(name):
    optimizer = FusedEmaAdam([{"params": [nn.Parameter(torch.ones(1))], name: GROUP_OPTIONS[name]}])
    checkpoint = FusedEmaAdam([nn.Parameter(torch.ones(1))]).state_dict()
    del checkpoint["param_groups"][0][name]
    optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0][name] == GROUP_OPTIONS[name]


def test_an_option_missing_in_a_pickle_gets_its_default():
    optimizer = FusedEmaAdam([nn.Parameter(torch.ones(1))], ema_decay=0.5)
    del optimizer.param_groups[0]["ema_decay"]
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["ema_decay"] == 0.5


@pytest.mark.parametrize("saved_step", [torch.tensor(3.0), torch.tensor([3.0]), 3, 3.0], ids=repr)
def test_a_step_count_of_another_type_is_loaded(saved_step):
    model = Weights()
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    train(model, optimizer, range(3))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for state in checkpoint["state"].values():
        state["step"] = saved_step
    resumed_model = copy.deepcopy(model)
    resumed_optimizer = FusedEmaAdam(resumed_model.parameters())
    resumed_optimizer.load_state_dict(checkpoint)
    train(model, optimizer, [3])
    train(resumed_model, resumed_optimizer, [3])
    assert_all_equal(weights_of(resumed_model), weights_of(model))
    assert all(state["step"].dtype == torch.int64 for state in resumed_optimizer.state.values())


def test_an_average_missing_in_a_checkpoint_starts_from_the_weights_at_the_next_step():
    model = Weights()
    optimizer = FusedEmaAdam(model.parameters(), ema_decay=1.0)
    train(model, optimizer, range(3))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for state in checkpoint["state"].values():
        del state["ema_params"]
    expected = weights_of(model)
    with pytest.warns(UserWarning, match="no 'ema_params' for parameters 0-5 of group 0, or those .*; their EMA"):
        optimizer.load_state_dict(checkpoint)
    train(model, optimizer, [3])
    assert_all_equal(averages_of(model, optimizer), expected)


def test_averages_that_only_some_parameters_have_in_a_checkpoint_are_warned_of():
    model = Weights()
    optimizer = FusedEmaAdam(model.parameters())
    train(model, optimizer, range(3))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for i in (1, 2, 4):
        del checkpoint["state"][i]["ema_params"]
    with pytest.warns(UserWarning, match="no 'ema_params' for parameters 1-2, 4 of group 0, or") as warnings:
        optimizer.load_state_dict(checkpoint)
    assert len(warnings) == 1 and warnings[0].filename == __file__


@pytest.mark.parametrize("loads_before_freezing", [True, False])
def test_averages_of_frozen_parameters_are_loaded_by_pytorchs_functions_only_before_freezing(loads_before_freezing):
    model, loaded = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    optimizer, resumed = (FusedEmaAdam(one.parameters(), lr=0.1, ema_decay=0.9) for one in (model, loaded))
    for step in range(3):
        model[0].requires_grad_(step < 2)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    loaded.load_state_dict(model.state_dict())
    loaded[0].requires_grad_(loads_before_freezing)
    set_optimizer_state_dict(loaded, resumed, get_optimizer_state_dict(model, optimizer))
    assert (loaded[0].weight in resumed.state) == loads_before_freezing
    if loads_before_freezing:
        assert_all_equal(_optim.averages_of(loaded, resumed), _optim.averages_of(model, optimizer))


def trained(dtype=torch.float64, **options):
    model = Weights(dtype)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS, **options)
    train(model, optimizer, range(5))
    return model, optimizer


@each_dtype
def test_inside_a_swap_the_parameters_hold_their_averages(dtype):
    model, optimizer = trained(dtype)
    averages = [average.clone() for average in averages_of(model, optimizer)]
    with optimizer.swap_ema_params():
        assert_all_equal(weights_of(model), [average.to(dtype) for average in averages])


@each_dtype
def test_after_a_swap_weights_and_state_are_as_before_bit_for_bit(dtype):
    model, optimizer = trained(dtype)
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    before = weights_of(model) + states_of(optimizer)
    with optimizer.swap_ema_params():
        pass
    assert_all_equal(weights_of(model) + states_of(optimizer), before)


def test_after_an_exception_in_a_swap_weights_and_state_are_as_before():
    model, optimizer = trained()
    before = weights_of(model) + states_of(optimizer)
    with pytest.raises(KeyError), optimizer.swap_ema_params():
        raise KeyError
    assert_all_equal(weights_of(model) + states_of(optimizer), before)


@pytest.mark.parametrize("nth", range(12))  # of 6 copies of weights, and 6 of averages
def test_after_an_exception_on_the_way_into_a_swap_weights_and_state_are_as_before(nth):
    model, optimizer = trained()
    before = weights_of(model) + states_of(optimizer)

    def enter():
        with optimizer.swap_ema_params():
            pytest.fail("the block must not run")

    with pytest.raises(Failed):
        FailOperators(nth, 1).run(enter)
    assert_all_equal(weights_of(model) + states_of(optimizer), before)
    with optimizer.swap_ema_params():
        assert_all_equal(weights_of(model), averages_of(model, optimizer))


def test_a_swap_keeps_all_tensor_objects():
    model, optimizer = trained()
    addresses = [weight.data_ptr() for weight in model.parameters()]
    views = [weight.detach() for weight in model.parameters()]
    with optimizer.swap_ema_params():
        assert [weight.data_ptr() for weight in model.parameters()] == addresses
        assert_all_equal(views, weights_of(model))


def test_a_parameter_that_was_never_updated_keeps_its_weights_in_a_swap():
    weight = nn.Parameter(torch.ones(2))
    optimizer = FusedEmaAdam([weight])
    with optimizer.swap_ema_params():
        assert torch.equal(weight.detach(), torch.ones(2))


def test_a_swap_of_meta_parameters_is_a_no_op():
    weight = nn.Parameter(torch.empty(2, device="meta"))
    with FusedEmaAdam([weight]).swap_ema_params():
        assert weight.is_meta


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_change_of_a_parameter_that_was_never_updated_raises_and_the_weights_are_restored(error):
    weight = nn.Parameter(torch.ones(2))
    optimizer = FusedEmaAdam([weight])
    sentence = (
        "restored, but in-place changes of parameters 0 of group 0 .* not in their EMA weights .*their first step"
    )
    with pytest.raises(RuntimeError, match=sentence), optimizer.swap_ema_params(), torch.no_grad():
        weight.fill_(7)
        if error is not None:
            raise error
    assert torch.equal(weight.detach(), torch.ones(2))
    with optimizer.swap_ema_params():
        assert torch.equal(weight.detach(), torch.ones(2))


@pytest.mark.parametrize("flatten", [False, True], ids=["one by one", "flattened"])
def test_a_swap_after_loading_adamw_takes_over_the_averages_of_swa_utils(flatten):
    model = Weights()
    theirs = torch.optim.AdamW(model.parameters())
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for step in range(3):
        model.set_gradients(step)
        theirs.step()
        averaged.update_parameters(model)
    weights, averages = weights_of(model), weights_of(averaged.module)
    optimizer = FusedEmaAdam(model.parameters(), flatten=flatten)
    with pytest.warns(UserWarning, match="their EMA starts from the weights"):
        optimizer.load_state_dict(theirs.state_dict())
    with optimizer.swap_ema_params():
        model.load_state_dict(dict(averaged.module.named_parameters()), strict=False)
    assert_all_equal(weights_of(model), weights)
    assert_all_equal(averages_of(model, optimizer), averages)


def test_in_place_changes_of_a_parameter_in_a_swap_are_written_to_its_average():
    model, optimizer = trained()
    weight = next(model.parameters())
    with optimizer.swap_ema_params(), torch.no_grad():
        weight.fill_(7)
    assert (optimizer.state[weight]["ema_params"] == 7).all()


@each_dtype
@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16], ids=str)
def test_changes_to_the_value_in_another_precision_are_written_to_the_average(other, dtype):
    model, optimizer = trained(dtype)
    weight = next(model.parameters())
    with optimizer.swap_ema_params(), torch.no_grad():
        before = weight.clone()
        weight.copy_(weight.to(other))
        expected = torch.where(weight == before, optimizer.state[weight]["ema_params"], weight)
    assert torch.equal(optimizer.state[weight]["ema_params"], expected)


def test_a_change_to_the_value_in_another_precision_of_a_parameter_that_was_never_updated_raises():
    weight = nn.Parameter(torch.tensor([1.001], dtype=torch.float16))
    optimizer = FusedEmaAdam([weight])
    with pytest.raises(RuntimeError, match="before their first step"), optimizer.swap_ema_params(), torch.no_grad():
        weight.copy_(weight.bfloat16())
    assert weight.item() != 1


CONVERSIONS = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "float": nn.Module.float,
    "double": nn.Module.double,
}


@pytest.mark.parametrize("flatten", [False, True], ids=["one by one", "flattened"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@each_dtype
def test_a_model_that_a_swap_converted_has_its_weights_dtype_and_averages_afterwards(dtype, conversion, flatten):
    model, optimizer = trained(dtype, flatten=flatten)
    other_model, other_optimizer = trained(dtype, flatten=flatten)
    with optimizer.swap_ema_params():
        CONVERSIONS[conversion](model)
    assert_all_equal(weights_of(model) + states_of(optimizer), weights_of(other_model) + states_of(other_optimizer))
    for each, each_optimizer in (model, optimizer), (other_model, other_optimizer):
        train(each, each_optimizer, range(5, 8))
    assert_all_equal(weights_of(model) + states_of(optimizer), weights_of(other_model) + states_of(other_optimizer))


def test_a_parameter_that_a_swap_converted_and_changed_has_the_change_in_its_average():
    model, optimizer = trained(torch.float32)
    weight = next(model.parameters())
    average = optimizer.state[weight]["ema_params"].clone()
    with optimizer.swap_ema_params(), torch.no_grad():
        model.half()
        weight[0] = 7
    average[0] = 7
    assert torch.equal(optimizer.state[weight]["ema_params"], average)


@pytest.mark.parametrize("flatten", [False, True], ids=["one by one", "flattened"])
def test_frozen_parameters_that_a_swap_converted_have_their_dtype_afterwards(flatten):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS, flatten=flatten)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    weights = weights_of(model)
    with optimizer.swap_ema_params():
        model.half()
    assert_all_equal(weights_of(model), weights)
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("conversion", ["half", "bfloat16"])
@each_dtype
def test_converting_a_model_there_and_back_inside_a_swap_changes_no_average(dtype, conversion):
    model, optimizer = trained(dtype)
    expected = weights_of(model) + states_of(optimizer)
    with optimizer.swap_ema_params():
        CONVERSIONS[conversion](model)
        model.to(dtype)
    assert_all_equal(weights_of(model) + states_of(optimizer), expected)


def test_dtensors_that_a_swap_converted_have_their_weights_rounded_and_it_raises(mesh_of_one):
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh_of_one)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    weights = [weight.to_local().clone() for weight in model.parameters()]
    averages = [average.to_local().clone() for average in averages_of(model, optimizer)]
    sentence = (
        r"parameters 0-1 of group 0 could not be restored; load a checkpoint \(their dtype was changed from"
        r" torch.float32 to torch.float16 inside the with block, to which the weights are rounded; convert the model"
        r" back inside the block\)$"
    )
    with pytest.raises(RuntimeError, match=sentence), optimizer.swap_ema_params():
        model.half()
    rounded = [weight.half() for weight in weights]
    assert_all_equal([weight.to_local().detach() for weight in model.parameters()], rounded)
    assert_all_equal([average.to_local() for average in averages_of(model, optimizer)], averages)


def test_dtensors_that_a_swap_converted_there_and_back_have_their_weights(mesh_of_one):
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh_of_one)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    weights = [weight.to_local().clone() for weight in model.parameters()]
    with optimizer.swap_ema_params():
        model.half()
        model.float()
    assert_all_equal([weight.to_local().detach() for weight in model.parameters()], weights)


@each_dtype
def test_changes_of_dtensors_in_a_swap_after_loading_adamw_are_their_averages(mesh_of_one, dtype):
    model = nn.Linear(3, 2).to(dtype)
    fully_shard(model, mesh=mesh_of_one)
    theirs, optimizer = torch.optim.AdamW(model.parameters()), FusedEmaAdam(model.parameters())
    model(torch.ones(4, 3, dtype=dtype)).square().sum().backward()
    theirs.step()
    weights = [weight.to_local().clone() for weight in model.parameters()]
    with pytest.raises(RuntimeError, match="their first step"), optimizer.swap_ema_params(), torch.no_grad():
        model.weight.to_local().fill_(7)
    assert_all_equal([weight.to_local().detach() for weight in model.parameters()], weights)
    with pytest.warns(UserWarning, match="starts from the weights"):
        optimizer.load_state_dict(theirs.state_dict())
    with optimizer.swap_ema_params(), torch.no_grad():
        model.weight.to_local().fill_(7)
    assert_all_equal([weight.to_local().detach() for weight in model.parameters()], weights)
    assert (optimizer.state[model.weight]["ema_params"].to_local() == 7).all()


def test_16_bit_weights_that_a_distributed_checkpoint_loads_into_dtensors_are_kept(mesh_of_one, tmp_path):
    # It writes to the local shards, whose version counters are not those of the DTensors.
    weight, loaded = (
        nn.Parameter(distribute_tensor(torch.full((4,), value, dtype=torch.bfloat16), mesh_of_one))
        for value in (1.0, 3.0)
    )
    optimizer = FusedEmaAdam([weight], lr=0.0, ema_decay=0.0)
    weight.grad = torch.zeros_like(weight)
    for _ in range(2):
        optimizer.step()
    dcp.save({"weight": loaded}, checkpoint_id=tmp_path)
    dcp.load({"weight": weight}, checkpoint_id=tmp_path)
    optimizer.step()
    for value in (weight, optimizer.state[weight]["master_params"], optimizer.state[weight]["ema_params"]):
        assert value.to_local().tolist() == [3.0] * 4


def test_16_bit_weights_that_are_loaded_into_the_state_dict_of_dtensors_and_then_into_the_model_are_kept(
    mesh_of_one, tmp_path
):
    # The state dict's tensors share the memory of the parameters, but not their version counters.
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model.weight = nn.Parameter(distribute_tensor(torch.ones_like(model.weight), mesh_of_one))
    optimizer = FusedEmaAdam(model.parameters(), lr=0.0, ema_decay=0.0)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    dcp.save({name: value * 3 for name, value in model.state_dict().items()}, checkpoint_id=tmp_path)
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=tmp_path)
    model.load_state_dict(weights)
    optimizer.step()
    for value in (model.weight, optimizer.state[model.weight]["master_params"]):
        assert torch.equal(value.to_local().float(), torch.full((4, 4), 3.0))


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_a_gradient_is_a_dtensor_if_its_parameter_is_one_or_the_step_raises(mesh_of_one, is_dtensor):
    def wrap(is_one):
        return distribute_tensor(torch.ones(2), mesh_of_one) if is_one else torch.ones(2)

    first, weight = nn.Parameter(torch.ones(2)), nn.Parameter(wrap(is_dtensor))
    optimizer = FusedEmaAdam([first, weight])
    first.grad, weight.grad = torch.ones(2), wrap(not is_dtensor)
    param, grad = ("DTensor", "plain tensor") if is_dtensor else ("plain tensor", "DTensor")
    sentence = f"the gradient of parameter 1 of group 0 must be a {param}, as its parameter is, but it is a {grad}"
    with pytest.raises(RuntimeError, match=f"^FusedEmaAdam: {sentence}$"):
        optimizer.step()
    assert torch.equal(first.detach(), torch.ones(2)) and not optimizer.state


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_a_backward_pass_through_swapped_weights_raises(mesh_of_one, is_dtensor):
    # autograd detects the in-place writes: a graph from before the swap needs the overwritten weights.
    weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh_of_one) if is_dtensor else torch.ones(2))
    optimizer = FusedEmaAdam([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    loss = weight.square().sum()
    with optimizer.swap_ema_params():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = weight.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_training_after_a_swap_continues_as_without_it():
    model, optimizer = trained()
    other_model, other_optimizer = trained()
    with optimizer.swap_ema_params():
        pass
    train(model, optimizer, range(5, 8))
    train(other_model, other_optimizer, range(5, 8))
    assert_all_equal(weights_of(model) + states_of(optimizer), weights_of(other_model) + states_of(other_optimizer))


def test_the_default_device_does_not_change_the_device_of_the_step_counts():
    model, optimizer = trained(torch.float32)
    with torch.device("meta"):
        steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert [step.device.type for step in steps] == ["cpu"] * len(list(model.parameters()))
