"""FusedEmaAdam: when the average moves, and how to get it out."""

import copy

from torch_aclnn_ops.optim import FusedEmaAdam
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
    averages_of,
    each_flatten,
    train,
    weights_of,
)


def ratio(decay, n):
    return min(decay, (1 + n) / (10 + n))


def power(decay, n, gamma=1.0, exponent=2 / 3):
    return min(decay, 1 - (1 + n / gamma) ** -exponent)


# The decays of the steps from the first on.
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
def test_decays_computed_on_a_device_equal_those_on_the_host(options, decays):
    group = FusedEmaAdam([nn.Parameter(torch.ones(1))], ema_decay=0.6, **options).param_groups[0]
    _, schedule = options_of(group)
    assert [schedule.decay_at(step) for step in range(1, 10)] == pytest.approx(decays, abs=1e-15)
    assert schedule.decays_at(torch.arange(1, 10)).tolist() == pytest.approx(decays, abs=1e-15)


class Network(nn.Module):
    """Has a buffer, tied weights, and a parameter that no gradient reaches."""

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


def test_an_ema_model_file_loads_and_is_replaced_atomically(tmp_path, monkeypatch):
    network, optimizer = trained_network()
    path = tmp_path / "ema.pt"
    optimizer.save_ema_model(network, path)
    saved = torch.load(path, weights_only=True)
    expected = optimizer.ema_state_dict(network)
    assert list(saved) == list(expected)
    assert_all_equal(list(saved.values()), list(expected.values()))
    before = path.read_bytes()

    def write_half(contents, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(OSError, match="disk full"):
        optimizer.save_ema_model(network, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["ema.pt"]


def test_a_swap_inside_autocast_uses_no_weights_that_were_cast_before_it():
    network, optimizer = trained_network()
    layer, rows = network.first, torch.ones(2, network.first.in_features)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        weights = layer(rows)  # autocast keeps the cast weights until the end of its block
        with optimizer.swap_ema_params():
            averages = layer(rows)
        assert torch.equal(layer(rows), weights)
    with torch.no_grad(), optimizer.swap_ema_params(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(rows), averages)
    assert not torch.equal(averages, weights)
