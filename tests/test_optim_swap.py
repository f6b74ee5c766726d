"""FusedEmaAdam: parameters hold averages inside a swap and weights afterwards; messages of failing steps."""

import itertools
import math

from torch_aclnn_ops.functional import fused_ema_adam
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests._failing_steps import CONFIGURATIONS, Failed, FailOperators, Trainee
from tests._optim import (
    OPTIONS,
    SETTINGS,
    Weights,
    assert_all_equal,
    assert_same,
    averaged_model,
    averages_of,
    each_dtype,
    each_flatten,
    step_with,
    train,
    trained,
    unchanged,
    weights_of,
)


@each_dtype
def test_inside_a_swap_the_parameters_hold_their_averages_and_afterwards_all_is_as_before_bit_for_bit(dtype):
    model, optimizer = trained(dtype)
    averages = [average.to(dtype, copy=True) for average in averages_of(model, optimizer)]
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    with unchanged(optimizer), optimizer.swap_ema_params():
        assert_all_equal(weights_of(model), averages)


def test_a_swap_keeps_all_tensor_objects():
    model, optimizer = trained()
    addresses = [weight.data_ptr() for weight in model.parameters()]
    views = [weight.detach() for weight in model.parameters()]
    with optimizer.swap_ema_params():
        assert [weight.data_ptr() for weight in model.parameters()] == addresses
        assert_all_equal(views, weights_of(model))


@pytest.mark.parametrize(("value", "error"), [(1.0, None), (1.0, KeyError), (math.nan, None)])
def test_a_change_of_a_parameter_that_was_never_updated_raises_and_the_weights_are_restored(value, error):
    weight = nn.Parameter(torch.full((2,), value))
    optimizer = FusedEmaAdam([weight])
    sentence = (
        "restored, but in-place changes of parameters .0. of group 0 .* not in their EMA weights .*their first step"
    )
    with pytest.raises(RuntimeError, match=sentence), optimizer.swap_ema_params(), torch.no_grad():
        weight.fill_(7)
        if error is not None:
            raise error
    assert_all_equal([weight.detach()], [torch.full((2,), value)])
    with optimizer.swap_ema_params():  # of which NaNs are no change
        assert_all_equal([weight.detach()], [torch.full((2,), value)])


@each_flatten
def test_a_swap_after_loading_adamw_takes_over_the_averages_of_swa_utils(flatten):
    model = Weights()
    theirs = torch.optim.AdamW(model.parameters())
    averaged = averaged_model(model, 0.5)
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


@each_flatten
@pytest.mark.parametrize("dtypes", [(torch.half,), (torch.double,), (torch.half, None)], ids=str)
@each_dtype
def test_a_model_that_a_swap_converted_has_its_weights_dtype_and_averages_afterwards(dtype, dtypes, flatten):
    model, optimizer = trained(dtype, flatten=flatten)
    other_model, other_optimizer = trained(dtype, flatten=flatten)
    with optimizer.swap_ema_params():
        for other in dtypes:
            model.to(other or dtype)
    assert_same(optimizer, other_optimizer)
    for each, each_optimizer in (model, optimizer), (other_model, other_optimizer):
        train(each, each_optimizer, range(5, 8))
    assert_same(optimizer, other_optimizer)


@each_flatten
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


def shards_of(model):
    return [weight.to_local().detach().clone() for weight in model.parameters()]


def test_dtensors_that_a_swap_converted_have_their_weights_rounded_and_it_raises(mesh_of_one):
    model = fully_shard(nn.Linear(3, 2), mesh=mesh_of_one)
    optimizer = FusedEmaAdam(model.parameters(), **SETTINGS)
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    weights = shards_of(model)
    averages = [average.to_local().clone() for average in averages_of(model, optimizer)]
    sentence = (
        r"parameters \[0, 1\] of group 0 could not be restored; load a checkpoint \(their dtype was changed from"
        r" torch.float32 to torch.float16 inside the with block, to which the weights are rounded; convert the model"
        r" back inside the block\)$"
    )
    with pytest.raises(RuntimeError, match=sentence), optimizer.swap_ema_params():
        model.half()
    assert_all_equal(shards_of(model), [weight.half() for weight in weights])
    assert_all_equal([average.to_local() for average in averages_of(model, optimizer)], averages)


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_a_backward_pass_through_swapped_weights_raises(mesh_of_one, is_dtensor):
    # autograd detects the in-place writes: a graph from before the swap needs the overwritten weights.
    weight = nn.Parameter(distribute_tensor(torch.ones(2), mesh_of_one) if is_dtensor else torch.ones(2))
    optimizer = FusedEmaAdam([weight])
    step_with(optimizer)
    loss = weight.square().sum()
    with optimizer.swap_ema_params():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = weight.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


NOTE = "FusedEmaAdam: the step stopped midway, so that parameters may be partly updated; load a checkpoint"


def notes_of(caught):
    return "\n".join(getattr(caught.value, "__notes__", ()))


def groups(steps=1, **options):
    """Return an optimizer before another step, with two groups that are updated one after the other."""
    weights = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    optimizer = FusedEmaAdam([{"params": weights[:3]}, {"params": weights[3:]}], **{**SETTINGS, **options})
    for weight in weights:
        weight.grad = weight.detach() + 1
    for _ in range(steps):
        optimizer.step()
    return weights, optimizer


@each_flatten
def test_a_step_that_fails_midway_says_to_load_a_checkpoint(flatten):
    weights, optimizer = groups(flatten=flatten)
    with pytest.raises(Failed) as caught:
        FailOperators(1, 1, "fused_adam").run(optimizer.step)  # in the second group
    assert notes_of(caught) == NOTE
    assert all(weight.grad is not None for weight in weights)


@each_flatten
def test_what_a_step_refuses_changes_nothing_and_has_no_note(flatten):
    weights, optimizer = groups(flatten=flatten)
    weights[3].grad = torch.ones(3).to_sparse()
    sentence = "gradient of parameter 0 of group 1 must be dense"
    with unchanged(optimizer), pytest.raises(RuntimeError, match=sentence) as caught:
        optimizer.step()
    assert not notes_of(caught)


@each_flatten
def test_states_of_all_groups_are_made_before_the_first_write(flatten):
    _, optimizer = groups(0, flatten=flatten)
    mode = FailOperators(10**6, 1)
    mode.run(optimizer.step)
    first_write = next(i for i, name in enumerate(mode.seen) if "_foreach_add_" in name)
    made = [i for i, name in enumerate(mode.seen) if "zeros" in name or "clone" in name]
    assert made and max(made) < first_write


def test_the_function_says_it_too():
    lists = [[torch.ones(2), torch.ones(2, dtype=torch.float16)] for _ in range(5)]
    with pytest.raises(Failed) as caught:
        FailOperators(3, 1).run(lambda: fused_ema_adam(*lists, [torch.tensor(0), torch.tensor(0)], **OPTIONS))
    assert notes_of(caught) == NOTE


def test_weights_are_restored_without_allocating_memory():
    # Leaving a swap of float32 parameters allocates nothing.
    _, optimizer = groups()
    mode = FailOperators(0, 0)
    with unchanged(optimizer):
        with optimizer.swap_ema_params():
            mode.__enter__()
        mode.__exit__(None, None, None)
    assert set(mode.seen) == {"aten.copy_.default"}


@pytest.mark.parametrize(
    "restored, lost",
    [
        (0, "parameters .0, 1, 2. of group 0 and .0. of group 1, buffer 'running_mean', buffer 'running_var', "),
        (4, "swap_ema_params: buffer 'running_mean', buffer 'running_var', "),
    ],
    ids=["nothing is restored", "the weights are"],
)
def test_a_swap_that_cannot_restore_something_names_it_and_leaves_the_optimizer_usable(restored, lost):
    weights, optimizer = groups(ema_buffers=nn.BatchNorm1d(3))
    before = optimizer.state_dict()
    sentence = f"{lost}buffer 'num_batches_tracked' could not be restored; load a checkpoint"
    mode = FailOperators(4 + restored, 1000, "copy_")  # after 4 copies to the averages
    with pytest.raises(RuntimeError, match=sentence), optimizer.swap_ema_params():
        mode.__enter__()
    mode.__exit__(None, None, None)
    optimizer.load_state_dict(before)
    with optimizer.swap_ema_params():
        pass
    optimizer.step()


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.every_nth_case(8)
@pytest.mark.parametrize("error", [Failed, KeyboardInterrupt])
def test_after_any_failing_operator_a_swap_has_restored_the_weights(name, error):
    for nth in itertools.count():
        trainee, mode, is_lost = Trainee(**CONFIGURATIONS[name]), FailOperators(nth, 1, error=error), False
        before = trainee.contents()
        try:
            mode.run(trainee.swap)
        except (RuntimeError, KeyboardInterrupt) as caught:
            is_lost = "could not be restored; load a checkpoint" in str(caught)
        if is_lost:
            trainee.resume()
            continue
        assert_all_equal(trainee.contents(), before)
        with trainee.optimizer.swap_ema_params():
            for param in trainee.params:
                assert torch.equal(param, trainee.optimizer.state[param]["ema_params"].to(param.dtype))
        if len(mode.seen) <= nth:
            break
    assert nth > 0


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.every_nth_case(4)
def test_after_any_failing_operator_of_a_step_a_checkpoint_continues_it(name):
    expected = Trainee(**CONFIGURATIONS[name])
    expected.step()
    for nth in itertools.count(0, 7):
        trainee, mode = Trainee(**CONFIGURATIONS[name]), FailOperators(nth, 1)
        try:
            mode.run(trainee.step)
        except RuntimeError as error:
            if "may be partly updated; load a checkpoint" not in "".join(getattr(error, "__notes__", ())):
                assert_all_equal(trainee.contents()[: len(trainee.params)], trainee.weights)
            trainee.resume()
        assert_all_equal(trainee.contents(), expected.contents())
        if len(mode.seen) <= nth:
            break
    assert nth > 0
