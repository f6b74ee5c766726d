"""FusedEmaAdam: its state, options and parameter groups."""

import copy
import inspect
import warnings

from torch_aclnn_ops.optim import FusedEmaAdam

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests._optim import (
    GROUP_OPTIONS,
    Weights,
    assert_all_close,
    assert_all_equal,
    contents_of,
    each_flatten,
    states_of,
    step_with,
    train,
    trained,
    unchanged,
    weights_of,
)

# Parameter group keys that torch's schedulers and other libraries add, or that programs choose.
KEYS = "initial_lr max_lr swa_lr base_momentum name names lr_scale wd_mult no_decay wd rho beta3 step ema_dcay".split()
LACKING = ("foreach", "fused", "capturable", "amsgrad", "differentiable")


def _in_the_constructor(**options):
    return FusedEmaAdam([nn.Parameter(torch.ones(1))], **options)


def _in_a_group(**options):
    return FusedEmaAdam([{"params": [nn.Parameter(torch.ones(1))], **options}])


def _in_a_later_group(**options):
    optimizer = _in_the_constructor()
    try:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
    finally:
        assert len(optimizer.param_groups) == 1
    return optimizer


each_place = pytest.mark.parametrize("make", [_in_the_constructor, _in_a_group, _in_a_later_group])


@pytest.mark.parametrize("name", LACKING)
@each_place
def test_an_option_of_torch_that_it_lacks_raises(make, name):
    with pytest.raises(TypeError, match=f"^FusedEmaAdam: {name} must not be given, but it is True; leave it out"):
        make(**{name: True})


@pytest.mark.parametrize("name", LACKING)
def test_an_option_of_torch_that_it_lacks_may_ask_for_nothing(name):
    for value in (None, False, 0):
        assert name not in _in_the_constructor(**{name: value}).param_groups[0]
        assert _in_a_group(**{name: value}).param_groups[0][name] is value


def test_an_unknown_argument_raises_and_torchs_are_not_in_the_signature():
    with pytest.raises(TypeError, match="unexpected keyword argument 'ema_dcay'"):
        FusedEmaAdam([torch.ones(1)], ema_dcay=0.9)
    parameters = inspect.signature(FusedEmaAdam).parameters
    assert "flatten" in parameters and "fused" not in parameters and "kwargs" not in parameters


def test_flatten_is_the_same_for_all_groups():
    assert not _in_a_group(flatten=False).param_groups[0]["flatten"]
    with pytest.raises(TypeError, match="^FusedEmaAdam: flatten is an .* must be False in every .*, but it is True"):
        _in_a_group(flatten=True)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_a_program_is_kept_in_its_group(key):
    assert _in_a_group(**{key: 0.5}).param_groups[0][key] == 0.5


def test_the_groups_of_an_optimizer_can_be_those_of_another():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    for other in (torch.optim.AdamW([weight]), optimizer, FusedEmaAdam(optimizer.param_groups, ema_decay=0.5)):
        mine = FusedEmaAdam(copy.deepcopy(other.param_groups))
        assert mine.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_each_parameter_counts_its_own_steps():
    mine, theirs = Weights(), Weights()
    optimizer = FusedEmaAdam(mine.parameters(), lr=1e-2)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(6):
        for model in (mine, theirs):
            model.set_gradients(step)
            for i, weight in enumerate(model.parameters()):
                if step % (i + 1):
                    weight.grad = None
        optimizer.step()
        adamw.step()
    assert [int(optimizer.state[weight]["step"]) for weight in mine.parameters()] == [6, 3, 2, 2, 2, 1]
    assert_all_close(weights_of(mine), weights_of(theirs), 1e-13)


def test_a_step_returns_the_loss_of_its_closure():
    weight = nn.Parameter(torch.ones(2))
    optimizer = FusedEmaAdam([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    assert (weight < 1).all()


@each_flatten
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.every_nth_case(5)
def test_a_compiled_step_with_a_scheduler_is_compiled_twice_at_most(backend, flatten):
    counter = CompileCounterWithBackend(backend)
    results = []
    for is_compiled in (True, False):
        model = Weights(torch.float32)
        optimizer = FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=0.9, flatten=flatten)
        step = torch.compile(optimizer.step, fullgraph=True, backend=counter) if is_compiled else optimizer.step
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for i in range(20):
            model.set_gradients(i)
            step()
            with warnings.catch_warnings():  # it does not see a compiled step
                warnings.simplefilter("ignore")
                scheduler.step()
        results.append(contents_of(optimizer))
    assert_all_close(*results, 1e-5)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("later", [False, True], ids=["from the start", "added later"])
@pytest.mark.parametrize("name", GROUP_OPTIONS)
def test_a_group_has_its_own_options(name, later):
    grouped, alone = Weights(), Weights()
    *others, last = grouped.parameters()
    group = {"params": [last], name: GROUP_OPTIONS[name]}
    optimizer = FusedEmaAdam([{"params": others}] if later else [{"params": others}, group], lr=1e-2)
    if later:
        optimizer.add_param_group(group)
    *others_alone, last_alone = alone.parameters()
    optimizer_of_others = FusedEmaAdam(others_alone, lr=1e-2)
    optimizer_of_last = FusedEmaAdam([last_alone], **{"lr": 1e-2, name: GROUP_OPTIONS[name]})
    for step in range(4):
        train(grouped, optimizer, [step])
        train(alone, optimizer_of_others, [step])
        optimizer_of_last.step()
    assert_all_equal(weights_of(grouped), weights_of(alone))
    assert_all_equal(states_of(optimizer), states_of(optimizer_of_others) + states_of(optimizer_of_last))


@each_flatten
def test_a_parameter_that_moves_to_another_group_has_its_options(flatten):
    first, second, third = (nn.Parameter(torch.ones(16)) for _ in range(3))
    optimizer = FusedEmaAdam([{"params": [first, second]}, {"params": [third], "lr": 0.0}], lr=0.1, flatten=flatten)
    step_with(optimizer)
    before = second.detach().clone()
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())
    step_with(optimizer)
    assert torch.equal(second, before) and not torch.equal(first, before)


@pytest.mark.parametrize("lr", [1, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor([0.5])], ids=repr)
@pytest.mark.usefixtures("path")
def test_any_number_type_is_accepted_as_learning_rate(lr):
    mine, theirs = Weights(), Weights()
    train(mine, FusedEmaAdam(mine.parameters(), lr=lr), range(3))
    train(theirs, FusedEmaAdam(theirs.parameters(), lr=float(lr)), range(3))
    assert_all_equal(weights_of(mine), weights_of(theirs))


WARMUPS = "None, 'ratio' or 'power'"
INVALID = {
    **{
        f"{name} = {value}": ({name: value}, ValueError, f"{name} must be at least 0 and finite, but it is {value}")
        for name in ("lr", "eps", "weight_decay")
        for value in (-0.1, float("nan"), float("inf"))
    },
    **{
        f"ema_decay = {value}": ({"ema_decay": value}, ValueError, f"ema_decay must be .* at most 1, but it is {value}")
        for value in (-0.1, 1.1, float("nan"))
    },
    **{
        f"betas = {betas}": ({"betas": betas}, ValueError, f"beta{i} must be .* below 1, but it is {betas[i - 1]}")
        for betas, i in (((1.0, 0.9), 1), ((-0.1, 0.9), 1), ((0.9, 1.0), 2), ((0.9, float("nan")), 2))
    },
    "three betas": ({"betas": (0.9, 0.9, 0.9)}, ValueError, r"betas must be a pair of numbers, but it is \(0\.9, 0\.9"),
    "one beta": ({"betas": 0.9}, TypeError, r"betas must be a pair of numbers, but it is 0\.9"),
    "no betas": ({"betas": None}, TypeError, "betas must be a pair of numbers, but it is None"),
    "a beta that is a tensor": (
        {"betas": (0.9, torch.tensor(0.5))},
        ValueError,
        r"betas must be a pair of numbers, but it is \(0\.9, tensor\(0\.5000\)\)",
    ),
    "two learning rates": (
        {"lr": torch.ones(2)},
        ValueError,
        r"lr must be a number or have one element, but its shape is \[2\]",
    ),
    "no number": ({"eps": "1e-8"}, TypeError, "eps must be a number, but it is '1e-8'"),
    "nothing": ({"lr": None}, TypeError, "lr must be a number, but it is None"),
    "eps True": ({"eps": True}, TypeError, "eps must be a number, but it is True"),
    "tensor betas": ({"betas": torch.ones(2).unbind()}, TypeError, "beta1 must be a number, but it is a tensor of"),
    **{
        f"{name} = 1": ({name: 1}, TypeError, f"{name} must be a bool, but it is 1")
        for name in ("decoupled_weight_decay", "bias_correction", "maximize")
    },
    **{
        f"warm-up {value!r}": ({"ema_warmup": value}, ValueError, f"ema_warmup must be {WARMUPS}, but it is {value!r}")
        for value in ("linear", 1)
    },
    **{
        f"{name} = {value}": ({name: value}, ValueError, f"{name} must be positive and finite, but it is {value}")
        for name in ("ema_warmup_gamma", "ema_warmup_power")
        for value in (0, -1.0, float("nan"), float("inf"))
    },
    "gamma is text": ({"ema_warmup_gamma": "1"}, TypeError, "ema_warmup_gamma must be a number, but it is '1'"),
    "start -1": ({"ema_start_step": -1}, ValueError, "ema_start_step must be at least 0, but it is -1"),
    "start 1.5": ({"ema_start_step": 1.5}, TypeError, "ema_start_step must be an int, but it is 1.5"),
    "every 0": ({"ema_update_every": 0}, ValueError, "ema_update_every must be at least 1, but it is 0"),
    "every True": ({"ema_update_every": True}, TypeError, "ema_update_every must be an int, but it is True"),
    "without_grad 0": ({"ema_without_grad": 0}, TypeError, "ema_without_grad must be a bool, but it is 0"),
    "masters 1": ({"master_weights": 1}, TypeError, "master_weights must be a bool, but it is 1"),
    "tensor decay": ({"ema_decay": torch.tensor(0.5)}, TypeError, "ema_decay must be a number, but it is tensor"),
}
each_invalid = pytest.mark.parametrize("options, exception, sentence", INVALID.values(), ids=INVALID)


@pytest.mark.parametrize("make", [_in_the_constructor, _in_a_later_group])
@each_invalid
def test_an_invalid_option_raises_and_no_group_is_added(options, exception, sentence, make):
    with pytest.raises(exception, match=f"^FusedEmaAdam: {sentence}"):
        make(**options)


@each_invalid
def test_a_step_with_an_option_that_became_invalid_raises_and_changes_nothing(options, exception, sentence):
    model = Weights()
    optimizer = FusedEmaAdam([{"params": [weight]} for weight in model.parameters()])
    train(model, optimizer, [0])
    optimizer.param_groups[-1].update(options)
    with unchanged(optimizer), pytest.raises(exception, match=f"^FusedEmaAdam: {sentence}"):
        optimizer.step()


@each_flatten
@pytest.mark.parametrize(
    "options, spoil, sentence",
    [
        ({"lr": torch.tensor(0.1)}, lambda group: group["lr"].fill_(-1), "lr must be at least 0 and finite"),
        ({"betas": [0.9, 0.99]}, lambda group: group["betas"].insert(0, 2.0), "betas must be a pair of numbers"),
    ],
    ids=["tensor", "list"],
)
def test_an_option_with_contents_that_became_invalid_raises(options, spoil, sentence, flatten):
    _, optimizer = trained(steps=2, **copy.deepcopy(options), flatten=flatten)
    spoil(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=f"^FusedEmaAdam: {sentence}"):
        optimizer.step()


_COMPLEX = torch.ones(2, dtype=torch.complex64)
BAD_GRADIENTS = {
    "sparse": (torch.ones(2, 2), torch.eye(2).to_sparse(), r"must be dense, but it is torch\.sparse_coo"),
    "complex": (_COMPLEX, _COMPLEX, r"must have a real dtype of 16, 32 or 64 bits, but it has torch\.complex64"),
    # Its second moment would be 0.
    "8 bits": (*[torch.ones(2).to(torch.float8_e4m3fn)] * 2, r"must have a real dtype .*, but it has .*float8_e4m3fn"),
}
if hasattr(torch.Tensor, "grad_dtype"):  # without it, as in torch 2.9, torch refuses such a gradient
    BAD_GRADIENTS["of another dtype"] = (
        torch.ones(2),
        torch.ones(2, dtype=torch.float64),
        r"must be torch\.float32 \[2\] on cpu, as its parameter is, but it is torch\.float64 \[2\] on cpu",
    )


@pytest.mark.parametrize("stepped", [False, True], ids=["in the first step", "later"])
@pytest.mark.parametrize("weight, gradient, sentence", BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
def test_an_invalid_gradient_raises_and_no_parameter_changes(weight, gradient, sentence, stepped):
    model = Weights()
    bad = nn.Parameter(weight.clone(), requires_grad=not weight.is_complex())
    optimizer = FusedEmaAdam([{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(1)), bad]}])
    if stepped:
        train(model, optimizer, range(2))
    model.set_gradients(2)
    bad.grad_dtype, bad.grad = None, gradient
    sentence = f"^FusedEmaAdam: the gradient of parameter 1 of group 1 {sentence}$"
    with unchanged(optimizer), pytest.raises(RuntimeError, match=sentence):
        optimizer.step()


@pytest.mark.parametrize("is_group", [False, True])
def test_a_set_of_parameters_is_refused(is_group):
    params = {nn.Parameter(torch.ones(2))}
    with pytest.raises(TypeError, match="params must be a list, not a set|ordered collections"):
        FusedEmaAdam([{"params": params}] if is_group else params)
