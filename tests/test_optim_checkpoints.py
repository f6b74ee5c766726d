"""FusedEmaAdam: training resumes from its checkpoints, and with weights that are loaded."""

import copy
import io
import pickle

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import distribute_tensor

from tests._optim import (
    GROUP_OPTIONS,
    Weights,
    assert_all_equal,
    assert_same,
    averages_of,
    each_dtype,
    each_flatten,
    step_with,
    train,
    trained,
    weights_of,
)


def _through_a_file(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    model = Weights(next(model.parameters()).dtype, seed=1)
    optimizer = FusedEmaAdam(model.parameters(), lr=0.5)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


WAYS = {
    "state_dict through a file": _through_a_file,
    "pickle": lambda *both: pickle.loads(pickle.dumps(both)),
    "deepcopy": lambda *both: copy.deepcopy(both),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_dtype
@each_flatten
def test_training_resumes_bit_for_bit_after(way, dtype, flatten):
    options = {"weight_decay": 0.1, "betas": (0.8, 0.99), "ema_warmup": "ratio", "ema_update_every": 2}
    model, optimizer = trained(dtype, 5, **options, flatten=flatten)
    resumed_model, resumed_optimizer = way(model, optimizer)
    train(model, optimizer, range(5, 10))
    train(resumed_model, resumed_optimizer, range(5, 10))
    assert_same(resumed_optimizer, optimizer)


def test_options_missing_in_a_checkpoint_are_unchanged_and_in_a_pickle_get_their_defaults():
    optimizer = FusedEmaAdam([nn.Parameter(torch.ones(1))], **GROUP_OPTIONS)
    checkpoint = FusedEmaAdam([nn.Parameter(torch.ones(1))]).state_dict()
    kept = {name: value for name, value in GROUP_OPTIONS.items() if name not in ("betas", "eps", "weight_decay")}
    for name in kept:
        del checkpoint["param_groups"][0][name]
    optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0].items() >= kept.items()
    del optimizer.param_groups[0]["ema_decay"]
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["ema_decay"] == 0.5


def test_averages_missing_in_a_checkpoint_are_warned_of_and_start_from_the_weights_at_the_next_step():
    model, optimizer = trained(ema_decay=1.0)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for i in (1, 2, 4):
        del checkpoint["state"][i]["ema_params"]
    expected = [
        weight if i in (1, 2, 4) else average.clone()
        for i, (weight, average) in enumerate(zip(weights_of(model), averages_of(model, optimizer), strict=True))
    ]
    sentence = "'ema_params' for parameters .1, 2, 4. of group 0, or those .*; their EMA"
    with pytest.warns(UserWarning, match=sentence) as caught:
        optimizer.load_state_dict(checkpoint)
    assert len(caught) == 1 and caught[0].filename == __file__
    train(model, optimizer, [3])
    assert_all_equal(averages_of(model, optimizer), expected)


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
        assert_all_equal(averages_of(loaded, resumed), averages_of(model, optimizer))


def test_16_bit_weights_that_a_distributed_checkpoint_loads_into_dtensors_are_kept(mesh_of_one, tmp_path):
    # It writes to the local shards, whose version counters are not those of the DTensors.
    values = torch.ones(4).bfloat16(), torch.full((4,), 3.0).bfloat16()
    weight, loaded = (nn.Parameter(distribute_tensor(value, mesh_of_one)) for value in values)
    optimizer = FusedEmaAdam([weight], lr=0.0, ema_decay=0.0)
    for _ in range(2):
        step_with(optimizer, 0.0)
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
    step_with(optimizer, 0.0)
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


def test_options_may_be_in_another_order_than_in_the_steps_before():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = FusedEmaAdam([weight], lr=0.1)
    for maximize in (False, True):
        saved = optimizer.state_dict()
        group = saved["param_groups"][0] | {"maximize": maximize, "bias_correction": not maximize}
        order = {"maximize": "bias_correction", "bias_correction": "maximize"} if maximize else {}
        saved["param_groups"] = [{order.get(name, name): group[order.get(name, name)] for name in group}]
        optimizer.load_state_dict(saved)
        before = weight.detach().clone()
        step_with(optimizer)
        assert ((weight > before) == maximize).all()
