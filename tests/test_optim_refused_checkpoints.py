"""FusedEmaAdam.load_state_dict: a refused or failed load changes nothing; unusual state dicts are loaded."""

import copy
import itertools
import sys
from functools import partial

from torch_aclnn_ops.optim import FusedEmaAdam

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from tests._failing_steps import Failed, FailOperators
from tests._optim import assert_all_equal, contents_of, step_with

CONFIGURATIONS = {
    "float32": (torch.float32, {}),
    "masters": (torch.bfloat16, {}),
    "masters flat": (torch.bfloat16, {"flatten": True}),
}
each_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)


class Run:
    """Two parameter groups, with an optimizer that has done some steps."""

    def __init__(self, configuration="masters flat", steps=3, seed=0, **options):
        dtype, more = CONFIGURATIONS[configuration]
        torch.manual_seed(seed)
        groups = [{"params": layer.to(dtype).parameters()} for layer in (nn.Linear(4, 3), nn.Linear(3, 2))]
        self.optimizer = FusedEmaAdam(groups, **{"lr": 0.1, "ema_decay": 0.9, **more, **options})
        self.train(steps)

    def train(self, steps):
        for step in range(steps):
            step_with(self.optimizer, step - 0.5)

    def tensors(self):
        return contents_of(self.optimizer)

    def objects(self):
        """Return the objects themselves, which must not be replaced either."""
        optimizer = self.optimizer
        states = [item for state in optimizer.state.values() for item in state.items()]
        groups = [item for group in optimizer.param_groups for item in group.items()]
        return [optimizer.state, optimizer.param_groups, *itertools.chain.from_iterable(states + groups)]


def are_identical(first, second):
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def checkpoint_of(configuration="masters flat"):
    """Return another run's state dict."""
    return copy.deepcopy(Run(configuration, 7, seed=1, lr=0.5, eps=1e-6).optimizer.state_dict())


def state(**changes):
    """Change entries of the state of parameter 1 of group 0, whose shape is [3]."""
    return lambda checkpoint: checkpoint["state"][1].update(copy.deepcopy(changes))


def option(**changes):
    """Change options of group 1."""
    return lambda checkpoint: checkpoint["param_groups"][1].update(changes)


def without(*path):
    def spoil(checkpoint):
        for key in path[:-1]:
            checkpoint = checkpoint[key]
        del checkpoint[path[-1]]

    return spoil


FORM = "must have the form of an optimizer's"
STEP = "step of parameter 1 of group 0 must be an integer from 0 to 2**53, or a tensor with one, but it is "
MOMENT = "exp_avg of parameter 1 of group 0 must be a real dense Tensor of [3], as its parameter, not a "
REFUSED = {
    "empty": (dict.clear, FORM),
    "groups of None": (lambda checkpoint: checkpoint.update(param_groups=[None]), FORM),
    "a group without params": (without("param_groups", 1, "params"), FORM),
    "a state in a list": (lambda checkpoint: checkpoint["state"].update({1: [None]}), FORM),
    "a moment of None": (state(exp_avg=None), FORM),
    "one group": (without("param_groups", 1), "the number of groups must be 2, but it is 1"),
    "one param": (option(params=[2]), "the number of params of group 1 must be 2, but it is 1"),
    "unknown ids": (option(params=[8, 9]), "the key of a parameter's state must be an id in params of a group"),
    "no step": (without("state", 1, "step"), "all of step, exp_avg, exp_avg_sq or none of them"),
    "a step in text": (state(step="3"), f"{STEP}'3'"),
    "two steps": (state(step=torch.ones(2)), f"{STEP}a real dense Tensor of [2]"),
    "a negative step": (state(step=-5), f"{STEP}-5"),
    "a fractional step": (state(step=torch.tensor(2.5)), STEP),
    "a large step": (state(step=2**53 + 1), STEP),
    "a step that is nan": (state(step=torch.tensor(float("nan"))), STEP),
    "a step on meta": (state(step=torch.ones((), device="meta")), f"{STEP}a real dense Tensor of [] on meta"),
    "another shape": (state(exp_avg=torch.ones(4)), f"{MOMENT}real dense Tensor of [4]"),
    "on meta": (state(exp_avg=torch.ones(3, device="meta")), f"{MOMENT}real dense Tensor of [3] on meta"),
    "integers": (state(exp_avg=torch.ones(3).long()), f"{MOMENT}torch.int64 dense Tensor of [3]"),
    "sparse": (state(exp_avg=torch.ones(3).to_sparse()), f"{MOMENT}real torch.sparse_coo Tensor of [3]"),
    # test_optim_options.py and test_optim_averages.py test the rules of all options.
    "an invalid option": (option(lr=-1.0), "in group 1, lr must be at least 0 and finite, but it is -1.0"),
    "an option of another type": (option(eps="1"), "in group 1, eps must be a number, but it is '1'"),
    "amsgrad": (option(amsgrad=True), "amsgrad of group 1 must be False, but it is True"),
}


@pytest.mark.parametrize("spoil, sentence", REFUSED.values(), ids=REFUSED)
def test_an_invalid_state_dict_raises_and_changes_nothing(spoil, sentence):
    run, checkpoint = Run(), checkpoint_of()
    spoil(checkpoint)
    before = run.objects(), run.tensors()
    with pytest.raises(ValueError, match=r"^FusedEmaAdam\.load_state_dict: ") as caught:
        run.optimizer.load_state_dict(checkpoint)
    assert sentence in str(caught.value)
    assert are_identical(run.objects(), before[0])
    assert_all_equal(run.tensors(), before[1])


def test_what_is_no_dict_raises():
    with pytest.raises(TypeError, match="the state dict must be a dict, but it is None"):
        Run().optimizer.load_state_dict(None)


# Accepted state dicts, each with an equivalent plain one.
UNUSUAL = {
    "step an int": (state(step=7), state(step=torch.tensor(7.0))),
    "step of numpy": (state(step=np.float32(7)), state(step=torch.tensor(7.0))),
    "step in a tensor of [1, 1]": (state(step=torch.full((1, 1), 7.0)), state(step=torch.tensor(7.0))),
    "step 2**53": (state(step=2**53), state(step=torch.tensor(2.0**53))),
    "exp_avg float64": (state(exp_avg=torch.ones(3).double()), state(exp_avg=torch.ones(3))),
    "exp_avg requires grad": (state(exp_avg=nn.Parameter(torch.ones(3))), state(exp_avg=torch.ones(3))),
    "a state of None": (lambda checkpoint: checkpoint["state"].update({1: None}), without("state", 1)),
    "an empty state": (lambda checkpoint: checkpoint["state"].update({1: {}}), without("state", 1)),
    "lr in a tensor": (option(lr=torch.tensor([0.25], dtype=torch.float64)), option(lr=0.25)),
    "betas a list": (option(betas=[0.8, 0.9]), option(betas=(0.8, 0.9))),
    "options missing": (without("param_groups", 1, "ema_decay"), option(ema_decay=0.9)),
    "an option of another": (option(capturable=True), option()),
    "other entries": (lambda checkpoint: (checkpoint.update(version=3), checkpoint["state"].update(a=1)), option()),
}


@pytest.mark.parametrize("unusual, plain", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("configuration", ["float32", "masters flat"])
def test_an_unusual_but_valid_state_dict_trains_like_a_plain_one(configuration, unusual, plain):
    found = []
    for change in (unusual, plain):
        run, checkpoint = Run(configuration), checkpoint_of(configuration)
        change(checkpoint)
        run.optimizer.load_state_dict(checkpoint)
        run.train(3)
        found.append(run.tensors())
    assert_all_equal(*found)


class Stop(Exception):
    pass


def _stop(*_):
    raise Stop


@each_configuration
def test_a_failing_pre_hook_leaves_the_old_state_and_a_failing_post_hook_the_new_one(configuration):
    run, loaded, checkpoint = Run(configuration), Run(configuration), checkpoint_of(configuration)
    before = run.objects()
    hook = run.optimizer.register_load_state_dict_pre_hook(_stop)
    with pytest.raises(Stop):
        run.optimizer.load_state_dict(checkpoint)
    assert are_identical(run.objects(), before)
    hook.remove()
    run.optimizer.register_load_state_dict_post_hook(_stop)
    with pytest.raises(Stop):
        run.optimizer.load_state_dict(copy.deepcopy(checkpoint))
    loaded.optimizer.load_state_dict(checkpoint)
    run.train(2)
    loaded.train(2)
    assert_all_equal(run.tensors(), loaded.tensors())


def test_hooks_get_the_state_dict_and_may_return_another_one():
    run, checkpoint, seen = Run(), checkpoint_of(), []
    run.optimizer.register_load_state_dict_pre_hook(lambda optimizer, given: seen.append((optimizer, given)))
    run.optimizer.register_load_state_dict_pre_hook(lambda *_: checkpoint)
    run.optimizer.register_load_state_dict_post_hook(seen.append)
    own = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(own)
    (optimizer, given), after = seen
    assert optimizer is after is run.optimizer
    assert given == own and given is not own
    assert run.optimizer.param_groups[0]["lr"] == 0.5


@each_configuration
def test_a_failing_operator_while_loading_leaves_the_optimizer_unchanged(configuration):
    run, checkpoint = Run(configuration), checkpoint_of(configuration)
    before = run.objects()
    nth, is_loaded = 0, False
    while not is_loaded:
        try:
            FailOperators(nth, 1).run(lambda: run.optimizer.load_state_dict(checkpoint))
            is_loaded = True
        except Failed:
            assert are_identical(run.objects(), before)
            nth += 1
    assert nth > 20


def _interrupted_at(nth, action):
    """Raise KeyboardInterrupt before the n-th line; return whether it was raised."""
    left = nth

    def trace(frame, *_):
        nonlocal left
        left -= 1
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.every_nth_case(2)
@pytest.mark.parametrize("configuration", ["masters", "masters flat"])
def test_an_interrupt_at_any_line_of_a_load_leaves_the_old_state_or_the_new_one(configuration):
    checkpoint = checkpoint_of(configuration)
    loaded = Run(configuration)
    loaded.optimizer.load_state_dict(checkpoint)
    run, is_loaded = Run(configuration), []
    before = run.objects()
    for nth in itertools.count(1):
        if not _interrupted_at(nth, lambda run=run: run.optimizer.load_state_dict(checkpoint)):
            break
        is_loaded.append(not are_identical(run.objects(), before))
        if is_loaded[-1]:
            assert_all_equal(run.tensors(), loaded.tensors())
            run = Run(configuration)
            before = run.objects()
    assert not is_loaded[0] and is_loaded == sorted(is_loaded)


def _sharded(contents, mesh, dim):
    """Return the contents with DTensors in place of all tensors except steps and scalars."""
    shard = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(dim)])
    return tree_map_only(torch.Tensor, lambda value: shard(value) if value.dim() else value, contents)


@pytest.mark.parametrize(
    "dim_of_param, dim_of_state, sentence",
    [
        (0, None, "must be a real dense DTensor of .* .load full tensors with .*full_state_dict=True.*, not a"),
        (None, 0, "must be a real dense Tensor of .*, as its parameter, not a real dense DTensor"),
        (0, 1, r"of \(Shard\(dim=0\),\), as its parameter, not .* of \(Shard\(dim=1\),\)$"),
        (0, 0, None),
    ],
    ids=["plain state", "plain parameter", "another placement", "the same placement"],
)
def test_states_must_be_sharded_like_their_parameters(mesh_of_one, dim_of_param, dim_of_state, sentence):
    weight, checkpoint = torch.ones(4, 4), FusedEmaAdam([param := nn.Parameter(torch.ones(4, 4))])
    param.grad = torch.ones(4, 4)
    checkpoint.step()
    contents = copy.deepcopy(checkpoint.state_dict())
    if dim_of_state is not None:
        contents = _sharded(contents, mesh_of_one, dim_of_state)
    if dim_of_param is not None:
        weight = _sharded(weight, mesh_of_one, dim_of_param)
    optimizer = FusedEmaAdam([nn.Parameter(weight)])
    if sentence is None:
        optimizer.load_state_dict(contents)
        (found,) = optimizer.state.values()
        assert torch.equal(found["exp_avg"].full_tensor(), checkpoint.state[param]["exp_avg"])
        return
    with pytest.raises(ValueError, match=rf"exp_avg of parameter 0 of group 0 .*{sentence}"):
        optimizer.load_state_dict(contents)
    assert not optimizer.state
