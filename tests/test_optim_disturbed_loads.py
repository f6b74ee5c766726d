"""FusedEmaAdam: hooks that raise, failing operators and interrupts leave the optimizer as it was before a load."""

from __future__ import annotations

import copy
import itertools
import sys

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

from tests._checkpoint_runs import (
    Run,
    are_identical,
    are_same,
    checkpoint_of,
    each_configuration,
    expanded,
)
from tests._failing_steps import Failed, FailOperators


class Stop(Exception):
    pass


def _stop(*_):
    raise Stop


@each_configuration
def test_a_failing_pre_hook_leaves_the_optimizer_unchanged(configuration):
    run, checkpoint = Run(configuration, 3), checkpoint_of(configuration)
    before = run.objects()
    run.optimizer.register_load_state_dict_pre_hook(_stop)
    with pytest.raises(Stop):
        run.optimizer.load_state_dict(checkpoint)
    assert are_identical(run.objects(), before)


@each_configuration
def test_a_failing_post_hook_leaves_the_complete_new_state(configuration):
    run, loaded = Run(configuration, 3), Run(configuration, 3)
    run.optimizer.register_load_state_dict_post_hook(_stop)
    with pytest.raises(Stop):
        run.optimizer.load_state_dict(checkpoint_of(configuration))
    loaded.optimizer.load_state_dict(checkpoint_of(configuration))
    run.train(2)
    loaded.train(2)
    assert are_same(run.contents(), loaded.contents())


def test_hooks_get_the_state_dict_and_may_return_another_one():
    run, loaded = Run("float32", 3), Run("float32", 3)
    checkpoint = checkpoint_of("float32")
    seen = []
    run.optimizer.register_load_state_dict_pre_hook(lambda optimizer, given: seen.append((optimizer, given)))
    run.optimizer.register_load_state_dict_pre_hook(lambda *_: checkpoint)
    run.optimizer.register_load_state_dict_post_hook(seen.append)
    own = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(own)
    loaded.optimizer.load_state_dict(checkpoint)
    (optimizer, given), after = seen
    assert optimizer is after is run.optimizer
    assert given == own and given is not own
    assert are_same(run.contents(), loaded.contents())


@each_configuration
def test_a_failing_operator_while_loading_leaves_the_optimizer_unchanged(configuration):
    run, checkpoint = Run(configuration, 3), checkpoint_of(configuration)
    checkpoint["state"][1]["exp_avg"] = expanded(checkpoint["state"][1]["exp_avg"])
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
    """Let Ctrl-C come before the n-th line; return whether it came."""
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


@pytest.mark.parametrize("configuration", ["masters", "float32 flat"])
@pytest.mark.every_nth_case(4)
def test_an_interrupt_at_any_line_of_a_load_leaves_a_consistent_state(configuration):
    checkpoint = checkpoint_of(configuration)
    loaded = Run(configuration, 3)
    loaded.optimizer.load_state_dict(checkpoint)
    after = loaded.contents()
    run = Run(configuration, 3)
    before, is_loaded = run.objects(), []
    for nth in itertools.count(1):
        if not _interrupted_at(nth, lambda run=run: run.optimizer.load_state_dict(checkpoint)):
            break
        is_loaded.append(not are_identical(run.objects(), before))
        if is_loaded[-1]:
            assert are_same(run.contents(), after)
            run = Run(configuration, 3)
            before = run.objects()
    assert not is_loaded[0] and is_loaded == sorted(is_loaded)


def _sharded(contents, mesh, dim):
    """Make DTensors of all tensors but steps and scalars."""
    return tree_map(
        lambda value: (
            distribute_tensor(value, mesh, [Shard(dim)]) if isinstance(value, torch.Tensor) and value.dim() else value
        ),
        contents,
    )


@pytest.mark.parametrize(
    "dim_of_param, dim_of_state, sentence",
    [
        (
            0,
            None,
            "must be a DTensor, as its parameter is .load full tensors with"
            r" torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and"
            r" StateDictOptions\(full_state_dict=True\)\), but it is a Tensor of",
        ),
        (None, 0, "must be a Tensor, as its parameter is, but it is a DTensor of"),
        (0, 1, r"must be placed as its parameter, \(Shard\(dim=0\),\), but it is .* with \(Shard\(dim=1\),\)"),
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
        (state,) = optimizer.state.values()
        assert torch.equal(state["exp_avg"].full_tensor(), checkpoint.state[param]["exp_avg"])
        return
    with pytest.raises(ValueError, match=rf"exp_avg of parameter 0 of group 0 {sentence}"):
        optimizer.load_state_dict(contents)
    assert not optimizer.state
