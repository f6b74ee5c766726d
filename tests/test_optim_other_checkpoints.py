"""FusedEmaAdam: checkpoints of other optimizers and torch.distributed.checkpoint."""

import copy

from torch_aclnn_ops.optim import FusedEmaAdam, to_mindspeed_state_dict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests._optim import (
    SETTINGS,
    STATE,
    Weights,
    assert_all_close,
    assert_all_equal,
    assert_same,
    averaged,
    averages_of,
    each_flatten,
    states_of,
    train,
    trained,
    weights_of,
)

OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@each_flatten
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@each_optimizer
def test_a_checkpoint_of_torch_resumes_with_averages_that_start_from_the_weights(name, options, flatten):
    theirs = Weights(is_last_transposed=False)
    optimizer = OPTIMIZERS[name](theirs.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.99), **options)
    train(theirs, optimizer, range(5))
    mine = copy.deepcopy(theirs)
    my_optimizer = FusedEmaAdam(mine.parameters(), ema_decay=0.5, flatten=flatten)
    with pytest.warns(UserWarning, match="no 'ema_params'.*their EMA starts from the weights") as caught:
        my_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(caught) == 1
    averages = weights_of(mine)
    train(mine, my_optimizer, range(5, 10))
    for step in range(5, 10):
        train(theirs, optimizer, [step])
        averages = averaged(averages, theirs, 0.5)
    assert_all_close(weights_of(mine), weights_of(theirs), 1e-13)
    assert_all_close(averages_of(mine, my_optimizer), averages, 1e-13)


@each_flatten
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@each_optimizer
def test_its_checkpoint_resumes_with_torch(name, options, flatten):
    settings = {"weight_decay": 0.1, "decoupled_weight_decay": name == "AdamW"}
    mine = Weights(is_last_transposed=False)
    my_optimizer = FusedEmaAdam(mine.parameters(), **SETTINGS, **settings, flatten=flatten)
    train(mine, my_optimizer, range(5))
    theirs = copy.deepcopy(mine)
    optimizer = OPTIMIZERS[name](theirs.parameters(), **options)
    state = copy.deepcopy(my_optimizer.state_dict())
    for group in state["param_groups"]:
        group.update(options)
    optimizer.load_state_dict(state)
    train(mine, my_optimizer, range(5, 10))
    train(theirs, optimizer, range(5, 10))
    assert_all_close(weights_of(theirs), weights_of(mine), 1e-13)


@each_flatten
@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_optimizer
def test_averages_restart_from_the_weights_after_training_with_torch(name, dtype, is_distributed, flatten):
    model, optimizer = trained(dtype, flatten=flatten)
    theirs = OPTIMIZERS[name](model.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, theirs, range(3, 6))
    weights = weights_of(model)
    back = FusedEmaAdam(model.parameters(), flatten=flatten)
    with pytest.warns(UserWarning, match="their EMA starts from the weights"):
        if is_distributed:
            set_optimizer_state_dict(model, back, get_optimizer_state_dict(model, theirs))
        else:
            back.load_state_dict(theirs.state_dict())
    back.param_groups[0].update(lr=0.0, ema_decay=1.0)
    train(model, back, [6])
    assert_all_equal(weights_of(model), weights)
    assert_all_equal(averages_of(model, back), [weight.float() for weight in weights])


def test_averages_of_version_0_2_that_kept_the_options_of_torch_are_loaded():
    model, optimizer = trained()
    torchs = torch.optim.AdamW(model.parameters()).state_dict()["param_groups"][0]
    contents = optimizer.state_dict()
    resumed = FusedEmaAdam(model.parameters())
    resumed.load_state_dict({**contents, "param_groups": [{**torchs, **contents["param_groups"][0]}]})
    assert_all_equal(states_of(resumed), states_of(optimizer))


# Some options of each, and what it lacks; the moments and most options of Adamax, NAdam and RAdam are Adam's.
OTHERS = {
    "SGD": ({"momentum": 0.9}, "betas, eps, amsgrad"),
    "ASGD": ({}, "betas, eps, amsgrad"),
    "Rprop": ({}, "betas, eps, amsgrad, weight_decay"),
    "Adagrad": ({}, "betas, amsgrad"),
    "Adadelta": ({}, "betas, amsgrad"),
    "RMSprop": ({}, "betas, amsgrad"),
    "Adamax": ({}, "amsgrad"),
    "NAdam": ({}, "amsgrad"),
    "RAdam": ({"decoupled_weight_decay": True}, "amsgrad"),
    "SparseAdam": ({}, "weight_decay"),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_optimizer_raises_and_changes_nothing(name, steps):
    model, optimizer = trained(steps=2)
    options, lacks = OTHERS[name]
    theirs = getattr(torch.optim, name)(list(model.parameters()), **options)
    train(model, theirs, range(steps if name != "SparseAdam" else 0))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"group 0 must have the options of Adam or AdamW, but it lacks {lacks}$"):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert_all_equal(list(optimizer.state_dict()["state"].values()), list(before["state"].values()))


@pytest.mark.parametrize("value, what", [("a.pt", "'a.pt'"), (FusedEmaAdam([torch.ones(1)]), "of type FusedEmaAdam")])
def test_what_is_no_state_dict_is_not_converted(value, what):
    with pytest.raises(TypeError, match=f"^to_mindspeed_state_dict: state_dict must be a dict, but it is {what}$"):
        to_mindspeed_state_dict(value)


def mindspeeds_state_dict(optimizer):
    """Return the state dict in MindSpeed's layout: a group's step is an int64 tensor, and states have no step."""
    contents = copy.deepcopy(optimizer.state_dict())
    steps = {int(state.pop("step")) for state in contents["state"].values()}
    (step,) = steps
    names = ("lr", "bias_correction", "betas", "eps", "weight_decay", "params")
    contents["param_groups"] = [
        {**{name: group[name] for name in names}, "step": torch.tensor(step)} for group in contents["param_groups"]
    ]
    return contents


@each_flatten
def test_a_checkpoint_of_mindspeed_resumes(flatten):
    model, optimizer = trained(steps=5, ema_warmup="ratio")
    other = copy.deepcopy(model)
    resumed = FusedEmaAdam(other.parameters(), **SETTINGS, ema_warmup="ratio", flatten=flatten)
    resumed.load_state_dict(mindspeeds_state_dict(optimizer))
    assert "step" not in resumed.param_groups[0]
    train(model, optimizer, range(5, 8))
    train(other, resumed, range(5, 8))
    assert_same(resumed, optimizer)


def test_a_state_dict_for_mindspeed_has_its_layout():
    _, optimizer = trained(steps=5)
    converted, expected = to_mindspeed_state_dict(optimizer.state_dict()), mindspeeds_state_dict(optimizer)
    assert converted["param_groups"][0]["step"].dtype == torch.int64
    assert expected["param_groups"][0].items() <= converted["param_groups"][0].items()
    for key, state in converted["state"].items():
        assert list(state) == list(STATE[1:])
        assert_all_equal(list(state.values()), list(expected["state"][key].values()))


def test_what_mindspeed_cannot_have_raises():
    model = Weights()
    optimizer, theirs = FusedEmaAdam(model.parameters()), torch.optim.AdamW(model.parameters())
    train(model, optimizer, [0])
    train(model, theirs, [0])
    next(model.parameters()).grad = None
    optimizer.step()
    with pytest.raises(ValueError, match=r"those of group 0 have \[1, 2\]"):
        to_mindspeed_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="^to_mindspeed_state_dict: .* that of 0 has no ema_params"):
        to_mindspeed_state_dict(theirs.state_dict())


@each_flatten
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_distributed_checkpoint_restores_all_states_of_a_new_optimizer(dtype, flatten, tmp_path):
    model, optimizer = trained(dtype, 5, flatten=flatten)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    other = Weights(dtype, seed=1)
    other_optimizer = FusedEmaAdam(other.parameters(), flatten=flatten)
    weights, state = get_state_dict(other, other_optimizer)
    contents = {"model": weights, "optimizer": state}
    dcp.load(contents, checkpoint_id=tmp_path)
    set_state_dict(other, other_optimizer, model_state_dict=contents["model"], optim_state_dict=contents["optimizer"])
    assert_same(other_optimizer, optimizer)
    train(model, optimizer, range(5, 10))
    train(other, other_optimizer, range(5, 10))
    assert_same(other_optimizer, optimizer)


def torch_needs_all_states():
    """Return whether torch's function raises for a flattened state dict that lacks a state, as in torch 2.9."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1)).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    del flat["state.bias.momentum_buffer"]
    try:
        set_optimizer_state_dict(model, optimizer, flat, options=options)
    except KeyError:
        return True
    return False


@pytest.mark.parametrize("has_all", [True] if torch_needs_all_states() else [True, False])
def test_a_flattened_state_dict_loads_the_states_that_it_has(has_all):
    (model, optimizer), other = trained(), Weights(seed=1)
    if not has_all:
        del optimizer.state[model.weights[3]]
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    flat = {name: value for name, value in flat.items() if has_all or not name.startswith("state.weights.3.")}
    resumed = FusedEmaAdam(other.parameters())
    set_optimizer_state_dict(other, resumed, flat, options=options)
    assert (other.weights[3] in resumed.state and bool(resumed.state[other.weights[3]])) == has_all
    assert_all_equal(states_of(resumed), states_of(optimizer))
    train(other, resumed, [3])


LONG = 2**24 + 5  # a number of steps that float32 cannot represent


def trained_for_long(**options):
    model, optimizer = trained(torch.float32, 1, ema_warmup="power", ema_update_every=2, **options)
    for state in optimizer.state.values():
        state["step"].fill_(LONG)
    return model, optimizer


def through_torch(model, optimizer):
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return theirs.state_dict()


LONG_WAYS = {
    "a state dict": lambda model, optimizer: optimizer.state_dict(),
    "AdamW": through_torch,
    "MindSpeed": lambda model, optimizer: to_mindspeed_state_dict(optimizer.state_dict()),
}


@each_flatten
@pytest.mark.parametrize("way", LONG_WAYS.values(), ids=LONG_WAYS)
def test_step_counts_beyond_float32_stay_exact_through(way, flatten):
    model, optimizer = trained_for_long(flatten=flatten)
    resumed = FusedEmaAdam(model.parameters())
    resumed.load_state_dict(way(model, optimizer))
    assert [int(state["step"]) for state in resumed.state.values()] == [LONG] * 6


def test_state_dict_hooks_get_the_returned_dict():
    _, optimizer = trained_for_long()
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, contents: seen.append(contents))
    optimizer.register_state_dict_post_hook(lambda *_: {"flat": 1})
    assert optimizer.state_dict() == {"flat": 1}
    assert all(state["step"].dtype == torch.float64 for state in seen[0]["state"].values())
