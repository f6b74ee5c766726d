"""FusedEmaAdam(ema_buffers=...): averages of buffers, such as the statistics of batch norm."""

import copy
import io
import pickle
import warnings

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests._optim import each_flatten

MEAN, VAR, COUNT = "1.running_mean", "1.running_var", "1.num_batches_tracked"


def conv_with_batch_norm(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 1)).to(dtype)


def optimizer_of(model, **options):
    return FusedEmaAdam(model.parameters(), lr=0.1, **{"ema_decay": 0.9, "ema_buffers": model, **options})


def train(model, step, count=1, after=lambda: None):
    torch.manual_seed(1)
    for _ in range(count):
        model.zero_grad()
        model(torch.rand(4, 2, 5, dtype=model[0].weight.dtype)).square().mean().backward()
        step()
        after()


def trained(**options):
    model = conv_with_batch_norm()
    optimizer = optimizer_of(model, **options)
    train(model, optimizer.step, 3)
    return model, optimizer


def assert_same(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-12, atol=1e-12)


@each_flatten
def test_they_are_those_of_averaged_model(flatten):
    model = conv_with_batch_norm()
    optimizer = optimizer_of(model, ema_start_step=1, flatten=flatten)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    train(model, optimizer.step, 5, lambda: averaged.update_parameters(model))
    # AveragedModel averages and rounds num_batches_tracked, which is copied here.
    assert_same(optimizer.ema_state_dict(model), {**averaged.module.state_dict(), COUNT: torch.tensor(5)})


@pytest.mark.parametrize(
    "options, decays",
    [
        ({}, [0.9] * 4),
        ({"ema_warmup": "ratio"}, [(1 + n) / (10 + n) for n in range(1, 5)]),
        ({"ema_update_every": 2}, [1.0, 0.9] * 2),
        ({"ema_start_step": 2}, [0.0, 0.0, 0.9, 0.9]),
    ],
)
def test_the_decay_is_that_of_the_step(options, decays):
    model, expected = conv_with_batch_norm(), []
    optimizer = optimizer_of(model, **options)

    def average():
        buffer, decay = model[1].running_mean, decays[len(expected)]
        expected.append(buffer.clone() if not expected else decay * expected[-1] + (1 - decay) * buffer)

    train(model, optimizer.step, 4, average)
    assert_same({MEAN: optimizer.ema_state_dict(model)[MEAN]}, {MEAN: expected[-1]})


def test_a_compiled_step_updates_them():
    models = [conv_with_batch_norm(), conv_with_batch_norm()]
    optimizers = [optimizer_of(model, ema_warmup="ratio") for model in models]
    train(models[0], optimizers[0].step, 3)
    train(models[1], torch.compile(optimizers[1].step, fullgraph=True, backend="eager"), 3)
    averages = [optimizer.state_dict()["ema_buffers"] for optimizer in optimizers]
    # The gradient of the bias before batch norm is only rounding errors, which Adam scales up.
    torch.testing.assert_close(*averages, rtol=1e-7, atol=1e-7)
    assert not torch.equal(averages[1][MEAN], models[1][1].running_mean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_those_of_16_bit_buffers_are_float32(dtype):
    model = conv_with_batch_norm(dtype)
    optimizer, expected = optimizer_of(model), []

    def average():
        buffer = model[1].running_var.float()
        expected.append(buffer if not expected else expected[-1].lerp(buffer, 0.1))

    train(model, optimizer.step, 3, average)
    average = optimizer.state_dict()["ema_buffers"][VAR]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, expected[-1], rtol=1e-6, atol=0)
    assert torch.equal(optimizer.ema_state_dict(model)[VAR], average.to(dtype))


def test_a_swap_exchanges_and_restores_them():
    model, optimizer = trained()
    weights, ema = copy.deepcopy(model.state_dict()), optimizer.ema_state_dict(model)
    assert not torch.equal(weights[MEAN], ema[MEAN])
    with pytest.raises(KeyError), optimizer.swap_ema_params():
        torch.testing.assert_close(model.state_dict(), ema, rtol=0, atol=0)
        model(torch.rand(4, 2, 5).double())  # batch norm writes to its buffers
        model.float()  # replaces them
        raise KeyError
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(optimizer.ema_state_dict(model)[MEAN], ema[MEAN])


@pytest.mark.parametrize("ema_without_grad", [True, False])
def test_a_skipped_step_or_one_without_any_gradient_treats_them_as_the_parameters(ema_without_grad):
    model, optimizer = trained(ema_without_grad=ema_without_grad)
    before = copy.deepcopy(optimizer.ema_state_dict(model))
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
    train(model, optimizer.step)
    assert_same(optimizer.ema_state_dict(model), {**before, COUNT: torch.tensor(4)})
    del optimizer.found_inf, optimizer.grad_scale
    optimizer.zero_grad()
    optimizer.step()
    after = optimizer.ema_state_dict(model)
    for name in (MEAN, "0.weight"):
        assert torch.equal(before[name], after[name]) is not ema_without_grad
    optimizer.reset_ema_params()
    assert_same(optimizer.ema_state_dict(model), model.state_dict())


def through_a_state_dict(model, optimizer):
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    new = conv_with_batch_norm()
    new_optimizer = optimizer_of(new)
    for target, contents in zip((new, new_optimizer), torch.load(file), strict=True):
        target.load_state_dict(contents)
    return new, new_optimizer


@pytest.mark.parametrize(
    "copied",
    [through_a_state_dict, lambda *pair: copy.deepcopy(pair), lambda *pair: pickle.loads(pickle.dumps(pair))],
    ids=["state_dict", "deepcopy", "pickle"],
)
def test_a_copy_trains_on_identically(copied):
    pair = trained()
    new = copied(*pair)
    for model, optimizer in (pair, new):
        train(model, optimizer.step, 2)
    torch.testing.assert_close(*(one.ema_state_dict(model) for model, one in (pair, new)), rtol=0, atol=0)


def test_a_state_without_them_warns_and_they_start_from_the_buffers():
    model, optimizer = trained()
    with warnings.catch_warnings(action="error"):  # a state from before the first step is complete
        optimizer_of(model).load_state_dict(optimizer_of(model).state_dict())
    state = optimizer.state_dict()
    del state["ema_buffers"]  # like torch.distributed.checkpoint.state_dict
    with pytest.warns(UserWarning, match="no 'ema_buffers'"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.ema_state_dict(model)[MEAN], model[1].running_mean)
    train(model, optimizer.step)
    assert torch.equal(optimizer.ema_state_dict(model)[MEAN], model[1].running_mean)


def test_with_fully_shard_they_are_in_full_state_dicts_but_not_in_those_of_distributed_checkpoint(mesh_of_one):
    model = fully_shard(conv_with_batch_norm(), mesh=mesh_of_one)
    optimizer = optimizer_of(model)
    train(model, optimizer.step, 3)
    average = optimizer.state_dict()["ema_buffers"][MEAN]
    assert torch.equal(optimizer.ema_state_dict(model, full_state_dict=True)[MEAN], average)
    state = get_optimizer_state_dict(model, optimizer)
    with pytest.warns(UserWarning, match="no 'ema_buffers'"):
        set_optimizer_state_dict(model, optimizer, state)


@pytest.mark.parametrize(
    "buffers, saved",
    [
        (True, {"mean": torch.ones(3)}),
        (True, {MEAN: torch.ones(3), VAR: torch.ones(2)}),
        (False, {MEAN: torch.ones(3)}),
        (True, {MEAN: torch.ones(3), VAR: 1}),
        (True, [torch.ones(3), torch.ones(3)]),
    ],
    ids=["names", "shapes", "without the argument", "a number", "a list"],
)
def test_averages_of_other_buffers_are_refused(buffers, saved):
    model, optimizer = trained(**({} if buffers else {"ema_buffers": None}))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="ema_buffers must be like those of the optimizer, {.*}, but it is [{[]"):
        optimizer.load_state_dict({**optimizer.state_dict(), "ema_buffers": saved})
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_those_that_a_state_dict_omits_and_that_modules_share():
    model = conv_with_batch_norm()
    model[0].register_buffer("scale", torch.ones(2).double(), persistent=False)
    model[3].register_buffer("shared", model[1].running_mean)
    optimizer = optimizer_of(model)
    train(model, optimizer.step, 2)
    contents = optimizer.ema_state_dict(model)
    assert "0.scale" not in contents
    assert torch.equal(contents[MEAN], contents["3.shared"])
    before = model[0].scale.zero_()
    with optimizer.swap_ema_params():
        assert torch.equal(before, torch.ones(2).double())
        model.float()
    assert torch.equal(before, torch.zeros(2).double())
    assert model[0].scale is before
    assert model[3].shared is model[1].running_mean


@pytest.mark.parametrize(
    "name, buffer",
    [("running_mean", torch.ones(4)), ("scale", torch.ones(1).expand(3)), ("scale", torch.eye(3).to_sparse())],
    ids=["another shape", "expanded", "sparse"],
)
def test_a_buffer_that_cannot_be_averaged_is_refused(name, buffer):
    model, optimizer = trained()
    model[1].register_buffer(name, buffer)
    weight = model[0].weight.clone()
    sentence = f"buffer '1.{name}' of ema_buffers must be a plain dense tensor of the shape"
    with pytest.raises(RuntimeError, match=sentence):
        optimizer.step()
    assert torch.equal(model[0].weight, weight)


def test_groups_of_different_decays_are_refused():
    model = conv_with_batch_norm()
    groups = [{"params": model[:2].parameters()}, {"params": model[3].parameters(), "ema_decay": 0.5}]
    with pytest.raises(ValueError, match="all parameter groups must have the same options of the EMA"):
        train(model, FusedEmaAdam(groups, ema_buffers=model).step)
    assert torch.equal(model[0].weight, conv_with_batch_norm()[0].weight)


def test_a_swap_leaves_buffers_alone_that_cannot_be_written():
    model = nn.Sequential(nn.LazyBatchNorm1d(), nn.BatchNorm1d(3))
    model[1].register_buffer("mask", torch.ones(1, dtype=torch.bool).expand(3))
    optimizer = FusedEmaAdam(model[1].parameters(), ema_buffers=model)
    with optimizer.swap_ema_params():
        model[1].running_mean.fill_(5)
    assert torch.equal(model[1].running_mean, torch.zeros(3))


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda model: optimizer_of(model, ema_buffers=True), "must be a torch.nn.Module or None, but it is True"),
        (
            lambda model: ZeroRedundancyOptimizer(model.parameters(), FusedEmaAdam, ema_buffers=model),
            "is an argument of the constructor .* where ZeroRedundancyOptimizer puts it",
        ),
    ],
    ids=["a flag", "ZeRO"],
)
def test_an_argument_that_is_not_a_module_or_in_a_group_is_refused(made, message, mesh_of_one):
    with pytest.raises(TypeError, match=f"ema_buffers {message}"):
        made(conv_with_batch_norm())
