"""FusedEmaAdam: when an average moves, also without a gradient, how it restarts, and how to export it."""

import copy
from types import SimpleNamespace

from torch_aclnn_ops.optim import FusedEmaAdam, unwrap
from torch_aclnn_ops.optim.options import options_of

import pytest
import torch
from torch import nn

from tests._optim import (
    SETTINGS,
    Weights,
    assert_all_close,
    assert_all_equal,
    averaged,
    averaged_model,
    averages_of,
    each_flatten,
    states_of,
    step_with,
    train,
    trained,
    weights_of,
)


def ratio(decay, n):
    return min(decay, (1 + n) / (10 + n))


def power(decay, n, gamma=1.0, exponent=2 / 3):
    return min(decay, 1 - (1 + n / gamma) ** -exponent)


# The decays of the first steps.
SCHEDULES = {
    "constant": ({}, [0.6] * 9),
    "ratio": ({"ema_warmup": "ratio"}, [ratio(0.6, n) for n in range(1, 10)]),
    "power": ({"ema_warmup": "power"}, [power(0.6, n) for n in range(1, 10)]),
    "slow power": (
        {"ema_warmup": "power", "ema_warmup_gamma": 5.0, "ema_warmup_power": 0.5},
        [power(0.6, n, 5.0, 0.5) for n in range(1, 10)],
    ),
    "as timm's ModelEmaV3(use_warmup=True), whose first update copies": (
        {"ema_warmup": "power", "ema_start_step": 1},
        [0.0] + [power(0.6, n) for n in range(1, 9)],
    ),
    "late": ({"ema_start_step": 4}, [0.0] * 4 + [0.6] * 5),
    "late ratio": ({"ema_start_step": 4, "ema_warmup": "ratio"}, [0.0] * 4 + [ratio(0.6, n) for n in range(1, 6)]),
    "every other": ({"ema_update_every": 2}, [1.0, 0.6] * 4 + [1.0]),
    "every third": ({"ema_update_every": 3}, [1.0, 1.0, 0.6] * 3),
    "late ratio, every other": (
        {"ema_start_step": 3, "ema_warmup": "ratio", "ema_update_every": 2},
        [0.0] * 3 + [1.0, ratio(0.6, 1), 1.0, ratio(0.6, 2), 1.0, ratio(0.6, 3)],
    ),
}
each_schedule = pytest.mark.parametrize("options, decays", SCHEDULES.values(), ids=SCHEDULES)


@each_flatten
@each_schedule
def test_the_average_follows_its_schedule(options, decays, flatten):
    model = Weights()
    optimizer = FusedEmaAdam(model.parameters(), lr=1e-2, ema_decay=0.6, **options, flatten=flatten)
    averages = weights_of(model)
    for step, decay in enumerate(decays):
        train(model, optimizer, [step])
        averages = averaged(averages, model, decay)
        assert_all_close(averages_of(model, optimizer), averages, 1e-14)


@each_schedule
def test_decays_computed_on_a_device_follow_the_schedule(options, decays):
    group = FusedEmaAdam([nn.Parameter(torch.ones(1))], ema_decay=0.6, **options).param_groups[0]
    _, schedule = options_of(group)
    assert schedule.decays_at(torch.arange(1, 10)).tolist() == pytest.approx(decays, abs=1e-15)


class Network(nn.Module):
    """Has a buffer, tied weights, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, batch):
        return self.tied(self.first(self.norm(batch)))


def trained_network(dtype=torch.float32, **options):
    torch.manual_seed(0)
    network = Network().to(dtype)
    optimizer = FusedEmaAdam(network.parameters(), **SETTINGS, **options)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.randn(8, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return network, optimizer


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ema_state_dict_equals_the_swapped_model(dtype, flatten):
    network, optimizer = trained_network(dtype, flatten=flatten)
    ema_network = Network().to(dtype)
    ema_network.load_state_dict(optimizer.ema_state_dict(network))
    batch = torch.randn(8, 4, dtype=dtype)
    for each in (network, ema_network):
        each.eval()
    assert not torch.equal(network(batch), ema_network(batch))
    with optimizer.swap_ema_params():
        assert torch.equal(network(batch), ema_network(batch))


@pytest.mark.parametrize("other", [copy.deepcopy, lambda model: torch.nn.Linear(4, 4)], ids=["a copy", "another model"])
def test_averages_of_a_model_that_is_not_optimized_are_refused_and_no_file_is_written(other, tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = FusedEmaAdam(model.parameters())
    sentence = "model must have parameters of this optimizer, but none of its 2 parameters is one of them"
    with pytest.raises(ValueError, match=sentence):
        optimizer.ema_state_dict(other(model))
    with pytest.raises(ValueError, match=sentence):
        optimizer.save_ema_model(other(model), tmp_path / "averages.pt")
    assert not list(tmp_path.iterdir())


MODEL = torch.nn.Linear(4, 4)
NO_MODEL = "model must be a torch.nn.Module, but it is"
WRONG = {
    "swapped": ("save_ema_model", ("a.pt", MODEL), f"{NO_MODEL} 'a.pt'"),
    "a number as path": ("save_ema_model", (MODEL, 5), "path must be a str or an os.PathLike, but it is 5"),
    "bytes as path": ("save_ema_model", (MODEL, b"a.pt"), "path must be a str or an os.PathLike, but"),
    "parameters": ("ema_state_dict", (MODEL.parameters(),), f"{NO_MODEL} of type generator"),
    "parameters to swap": ("swap_ema_params", (MODEL.parameters(),), f"{NO_MODEL} of type generator"),
}


@pytest.mark.parametrize("method, arguments, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise_with_the_name_of_the_method(method, arguments, message):
    optimizer = FusedEmaAdam(MODEL.parameters())
    with pytest.raises(TypeError, match=rf"^\w+\.\w+(\(\)|:) {message}"):
        getattr(optimizer, method)(*arguments)
    optimizer.swap_ema_params()  # no call is left running


def test_ema_state_dict_copies_buffers_and_untrained_parameters_and_keeps_weights_tied():
    network, optimizer = trained_network()
    state = optimizer.ema_state_dict(network)
    assert list(state) == list(network.state_dict())
    assert torch.equal(state["norm.running_mean"], network.norm.running_mean)
    assert torch.equal(state["unused"], network.unused.detach())
    assert state["first.weight"] is state["tied.weight"]
    before = {name: value.clone() for name, value in state.items()}
    for value in network.state_dict().values():
        value.add_(1)
    for tensors in optimizer.state.values():
        tensors["ema_params"].add_(1)
    assert_all_equal(list(state.values()), list(before.values()))


def test_entries_that_a_hook_of_the_model_computes_are_computed_of_the_averages():
    network, optimizer = trained_network()
    network.register_state_dict_post_hook(lambda _, state, *__: state.update({"new.unused": 2 * state.pop("unused")}))
    state = optimizer.ema_state_dict(network)
    with optimizer.swap_ema_params():
        expected = network.state_dict()
        assert list(state) == list(expected)
        assert_all_equal(list(state.values()), list(expected.values()))


def test_an_ema_model_file_has_the_state_dict(tmp_path):
    network, optimizer = trained_network()
    optimizer.save_ema_model(network, tmp_path / "ema.pt")
    saved, expected = torch.load(tmp_path / "ema.pt", weights_only=True), optimizer.ema_state_dict(network)
    assert list(saved) == list(expected)
    assert_all_equal(list(saved.values()), list(expected.values()))


def test_a_swap_inside_autocast_uses_no_weights_that_were_cast_before_it():
    network, optimizer = trained_network()
    layer, rows = network.first, torch.ones(2, network.first.in_features)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        weights = layer(rows)  # autocast caches the cast weights until the end of its block
        with optimizer.swap_ema_params():
            averages = layer(rows)
        assert torch.equal(layer(rows), weights)
    with torch.no_grad(), optimizer.swap_ema_params(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(rows), averages)
    assert not torch.equal(averages, weights)


# One of each kind is always compiled; compilation takes a hundred times as long as the steps.
COMPILED = ("late ratio", "every third")


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_averages_without_a_gradient_equal_those_of_swa_utils(dtype, flatten):
    model = Weights(dtype)
    optimizer = FusedEmaAdam(model.parameters(), lr=1e-2, ema_decay=0.9, ema_start_step=1, flatten=flatten)
    expected = averaged_model(model, 0.9)
    for step in range(20):
        model.set_gradients(step)
        for i, weight in enumerate(model.parameters()):
            if step > 0 and (step + i) % 3 == 0:
                weight.grad = None
        optimizer.step()
        expected.update_parameters(model)
    tolerance = 1e-6 if dtype.itemsize == 4 else 1e-14
    assert_all_close(averages_of(model, optimizer), weights_of(expected.module), tolerance)


@each_flatten
@pytest.mark.parametrize(
    ("is_compiled", "options", "decays"),
    [
        pytest.param(
            is_compiled,
            *schedule,
            id=f"{'compiled' if is_compiled else 'eager'}-{name}",
            marks=[pytest.mark.exhaustive] if is_compiled and name not in COMPILED else [],
        )
        for is_compiled in (False, True)
        for name, schedule in SCHEDULES.items()
    ],
)
@pytest.mark.every_nth_case(4)
def test_a_schedule_uses_the_largest_step_count(options, decays, flatten, is_compiled):
    model = Weights(torch.float64)
    optimizer = FusedEmaAdam(model.parameters(), lr=1e-2, ema_decay=0.6, **options, flatten=flatten)
    step = torch.compile(optimizer.step, fullgraph=True, backend="eager") if is_compiled else optimizer.step
    averages = weights_of(model)
    for i, decay in enumerate(decays):
        model.set_gradients(i)
        if i > 0:
            for weight in list(model.parameters())[1:]:
                weight.grad = None
        step()
        averages = averaged(averages, model, decay)
        assert_all_close(averages_of(model, optimizer), averages, 1e-6 if is_compiled else 1e-14)
    assert [int(optimizer.state[weight]["step"]) for weight in model.parameters()] == [len(decays), 1, 1, 1, 1, 1]


@each_flatten
@pytest.mark.parametrize("last", ["without any gradient", "with averages of one group"])
def test_a_schedule_counts_the_parameters_of_all_groups(flatten, last):
    frozen, trained = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [frozen]}, {"params": [trained], "ema_without_grad": last == "without any gradient"}]
    optimizer = FusedEmaAdam(groups, lr=0.1, ema_decay=0.5, ema_update_every=3, flatten=flatten)
    for step in range(4):  # the last one repeats step 3 for the schedule, which updates the averages
        for weight in (frozen, trained):
            weight.grad = torch.ones(4, dtype=torch.float64) if step < (1 if weight is frozen else 3) else None
        before = optimizer.state[frozen]["ema_params"].clone() if step else None
        optimizer.step()
        is_updated = before is not None and not torch.equal(optimizer.state[frozen]["ema_params"], before)
        assert is_updated == (step >= 2)


@each_flatten
def test_ema_without_grad_false_freezes_the_averages(flatten):
    model = Weights()
    moving, still = list(model.parameters())[:3], list(model.parameters())[3:]
    groups = [{"params": moving}, {"params": still, "ema_without_grad": False}]
    optimizer = FusedEmaAdam(groups, lr=0.1, ema_decay=0.5, flatten=flatten)
    train(model, optimizer, [0])
    before = [average.clone() for average in averages_of(model, optimizer)]
    optimizer.zero_grad()
    optimizer.step()
    after = averages_of(model, optimizer)
    assert_all_equal(after[3:], before[3:])
    assert_all_close(after[:3], averaged(before, model, 0.5)[:3], 1e-14)


@each_flatten
@pytest.mark.parametrize("master_weights", [True, False])
def test_a_16_bit_parameter_is_ema_updated_from_its_master_weight(master_weights, flatten):
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    optimizer = FusedEmaAdam([weight], lr=1e-3, ema_decay=0.75, master_weights=master_weights, flatten=flatten)
    step_with(optimizer)
    state = optimizer.state[weight]
    average, truth = state["ema_params"].clone(), state.get("master_params", weight.detach())
    weight.grad = None
    optimizer.step()
    torch.testing.assert_close(state["ema_params"], average.lerp(truth, 0.25), rtol=0, atol=0)
    with torch.no_grad():
        weight.fill_(5.0)
    optimizer.step()
    assert (state["ema_params"] > 1.9).all()


@each_flatten
def test_parameters_that_never_had_a_gradient_keep_their_weights_and_get_no_state(flatten):
    model = Weights()
    before, skipped = weights_of(model)[::2], list(model.parameters())[::2]
    optimizer = FusedEmaAdam(model.parameters(), flatten=flatten)
    model.set_gradients(0)
    for weight in skipped:
        weight.grad = None
    optimizer.step()
    assert_all_equal([weight.detach() for weight in skipped], before)
    assert not any(weight in optimizer.state for weight in skipped)


@each_flatten
def test_a_step_skipped_by_a_scaler_updates_no_average(flatten):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = FusedEmaAdam(weights, lr=0.1, ema_decay=0.5, flatten=flatten)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step_with(optimizer)
    before = states_of(optimizer)
    weights[1].grad = None
    scaler.scale(weights[0].sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert_all_equal(states_of(optimizer), before)


@each_flatten
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reset_averages_start_from_the_weights(dtype, flatten):
    model, optimizer = trained(dtype, lr=0.1, ema_decay=0.9999, flatten=flatten)
    with torch.no_grad():
        next(model.parameters()).fill_(3.0)  # by other code, so its master has to follow
    steps = [int(state["step"]) for state in optimizer.state.values()]
    optimizer.reset_ema_params()
    states = [optimizer.state[weight] for weight in model.parameters()]
    weights = [state.get("master_params", weight) for state, weight in zip(states, weights_of(model), strict=True)]
    assert_all_equal([state["ema_params"] for state in states], weights)
    assert (states[0]["ema_params"] == 3).all() and [int(state["step"]) for state in states] == steps


def test_unwrap_returns_the_optimizer_inside_wrappers():
    optimizer = FusedEmaAdam(Weights().parameters())
    assert unwrap(SimpleNamespace(optimizer=SimpleNamespace(optim=optimizer))) is optimizer


def test_unwrapping_another_optimizer_raises():
    adamw = torch.optim.AdamW(Weights().parameters())
    for optimizer in (adamw, SimpleNamespace(optimizer=adamw)):
        with pytest.raises(TypeError, match="^unwrap: optimizer must be a FusedEmaAdam or have one inside"):
            unwrap(optimizer)
