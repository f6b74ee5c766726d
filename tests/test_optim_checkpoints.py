"""FusedEmaAdam: training resumes from its checkpoints, by parameter names, and with loaded weights."""

import copy
import io
import pickle
import re

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import distribute_tensor

from tests._optim import (
    GROUP_OPTIONS,
    RESUMED_OPTIONS,
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


def _in_inference_mode(model, optimizer):
    model, state_dict = copy.deepcopy(model), optimizer.state_dict()
    optimizer = FusedEmaAdam(model.parameters(), lr=0.5)
    with torch.inference_mode():
        optimizer.load_state_dict(copy.deepcopy(state_dict))
    return model, optimizer


WAYS = {
    "state_dict in inference mode": _in_inference_mode,  # through a file: test_optim_flat.py
    "pickle": lambda *both: pickle.loads(pickle.dumps(both)),
    "deepcopy": lambda *both: copy.deepcopy(both),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_dtype
@each_flatten
def test_training_resumes_bit_for_bit_after(way, dtype, flatten):
    model, optimizer = trained(dtype, 5, **RESUMED_OPTIONS, flatten=flatten)
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
    # The state dict's tensors share the parameters' memory, but not their version counters.
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


VALUES = {"a": 1.0, "b": 100.0, "c": 7.0}


def _optimizer(*groups, named=True):
    """Return an optimizer whose learning rate in a group is the value of its first parameter, and its parameters."""
    params = {name: nn.Parameter(torch.full((4,), VALUES[name])) for names in groups for name in names}
    given = [
        {"params": [(name, params[name]) if named else params[name] for name in names], "lr": VALUES[names[0]] * 1e-3}
        for names in groups
    ]
    return FusedEmaAdam(given, ema_decay=0.9), params


def _checkpoint(*groups, **options):
    """Return a checkpoint after a step."""
    optimizer, _ = _optimizer(*groups, **options)
    step_with(optimizer)
    return copy.deepcopy(optimizer.state_dict())


def _averages(optimizer, params):
    return {name: round(optimizer.state[param]["ema_params"][0].item()) for name, param in params.items()}


ORDERS = {
    "the same": ["ab", "c"],
    "other parameters first": ["ba", "c"],
    "other groups first": ["c", "ab"],
    "both": ["c", "ba"],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_state_belongs_to_the_parameter_of_its_name(order):
    optimizer, params = _optimizer(*order)
    optimizer.load_state_dict(_checkpoint("ab", "c"))
    assert _averages(optimizer, params) == VALUES
    assert [group["param_names"] for group in optimizer.param_groups] == [list(names) for names in order]
    rates = {"".join(sorted(group["param_names"])): group["lr"] for group in optimizer.param_groups}
    assert rates == {"ab": 1e-3, "c": 7e-3}


@pytest.mark.parametrize(("was_named", "is_named"), [(False, True), (True, False), (False, False)])
def test_without_names_on_one_side_the_order_decides(was_named, is_named):
    optimizer, params = _optimizer("ba", named=is_named)
    optimizer.load_state_dict(_checkpoint("ab", named=was_named))
    assert _averages(optimizer, params) == {"b": VALUES["a"], "a": VALUES["b"]}


REFUSED = {
    "another name": (["ab"], ["ac"], "[['a', 'c']]", "[['a', 'b']]"),
    "more parameters": (["ab"], ["a"], "[['a']]", "[['a', 'b']]"),
    "more groups": (["b", "a"], ["a"], "[['a']]", "[['b'], ['a']]"),
    "other groups": (["ab", "c"], ["a", "bc"], "[['a'], ['b', 'c']]", "[['a', 'b'], ['c']]"),
}


@pytest.mark.parametrize(("saved", "own", "accepted", "found"), REFUSED.values(), ids=REFUSED)
def test_names_that_differ_are_refused_and_change_nothing(saved, own, accepted, found):
    optimizer, _ = _optimizer(*own)
    sentence = (
        f"FusedEmaAdam.load_state_dict: param_names of the groups must be {accepted} in any order, each name once (to"
        f" load by order, remove param_names), but it is {found}"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        optimizer.load_state_dict(_checkpoint(*saved))
    assert not optimizer.state


@pytest.mark.parametrize("is_named", [True, False])
def test_a_distributed_checkpoint_in_another_order_is_loaded_by_the_names_of_the_model(is_named):
    models = [nn.ParameterDict({name: torch.full((4,), VALUES[name]) for name in "ab"}) for _ in range(2)]
    first = FusedEmaAdam(models[0].named_parameters(), ema_decay=0.9)
    step_with(first)
    file = io.BytesIO()
    torch.save(get_optimizer_state_dict(models[0], first), file)
    file.seek(0)
    named = [("b", models[1]["b"]), ("a", models[1]["a"])]
    second = FusedEmaAdam(named if is_named else [param for _, param in named], ema_decay=0.9)
    set_optimizer_state_dict(models[1], second, torch.load(file))
    assert _averages(second, models[1]) == {"a": VALUES["a"], "b": VALUES["b"]}
    assert second.param_groups[0].get("param_names", ["b", "a"]) == ["b", "a"]
