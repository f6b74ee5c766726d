"""FusedEmaAdam: state dicts that do not fit, hooks that raise and interrupts leave the optimizer as it was."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import sys
import warnings
from decimal import Decimal
from functools import cache

from torch_aclnn_ops.optim import FusedEmaAdam, _calls

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

from tests.interrupts import Failed, FailOperators

CONFIGURATIONS = {
    "float32": (torch.float32, {}),
    "masters": (torch.bfloat16, {}),
    "16-bit states": (torch.bfloat16, {"master_weights": False}),
    "float32 flat": (torch.float32, {"flatten": True}),
    "masters flat": (torch.bfloat16, {"flatten": True}),
    "16-bit states flat": (torch.bfloat16, {"master_weights": False, "flatten": True}),
}
each_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)


class Run:
    """Two parameter groups, with an optimizer that has done some steps."""

    def __init__(self, configuration, steps, seed=0, **options):
        dtype, more = CONFIGURATIONS[configuration]
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
        groups = [{"params": layer.parameters()} for layer in self.model]
        self.optimizer = FusedEmaAdam(groups, **{"lr": 0.1, "ema_decay": 0.9, **more, **options})
        self.train(steps)

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            inputs = torch.randn(5, 4, dtype=self.model[0].weight.dtype)
            self.model(inputs).square().mean().backward()
            self.optimizer.step()

    def contents(self):
        """Everything that the optimizer keeps, with the averages as a swap shows them."""
        with self.optimizer.swap_ema_params():
            averages = [param.detach().clone() for param in self.model.parameters()]
        weights = [param.detach().clone() for param in self.model.parameters()]
        return copy.deepcopy([self.optimizer.state_dict(), averages, weights])

    def objects(self):
        """The objects themselves: what is unchanged is also not replaced."""
        optimizer = self.optimizer
        states = [list(state.items()) for state in optimizer.state.values()]
        buffers = [(buffer, buffer.weights) for group in optimizer._flat_groups.values() for buffer in group.buffers]
        addresses = [param.data_ptr() for param in self.model.parameters()]
        groups = [list(group.items()) for group in optimizer.param_groups]
        return [optimizer.state, states, buffers, addresses, optimizer.param_groups, groups]


def are_same(first, second):
    """Compare nested lists and dicts, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(are_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(are_same, first, second))
    return first is second or first == second


def are_identical(first, second):
    """Compare nested lists and tuples, and the objects in them by identity."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(are_identical, first, second))
    return first is second or (isinstance(first, (int, str)) and first == second)


@cache
def _state_dict_of_another(configuration):
    return Run(configuration, 7, seed=1, lr=0.5, eps=1e-6).optimizer.state_dict()


def checkpoint_of(configuration):
    """Another run's state dict."""
    return copy.deepcopy(_state_dict_of_another(configuration))


@cache
def undisturbed_contents(configuration, steps):
    return Run(configuration, steps).contents()


def state(name, change):
    """Change a tensor of parameter 1 of group 0, whose shape is [3]."""

    def spoil(checkpoint):
        checkpoint["state"][1][name] = change(checkpoint["state"][1][name])

    return spoil


def step(value):
    return state("step", lambda _: value)


def option(name, value):
    """Change an option of group 1."""
    return lambda checkpoint: checkpoint["param_groups"][1].update({name: value})


def entry(name, value):
    return lambda checkpoint: checkpoint.update({name: value})


def without(*path):
    def spoil(checkpoint):
        for key in path[:-1]:
            checkpoint = checkpoint[key]
        del checkpoint[path[-1]]

    return spoil


def _swap(first, second):
    def spoil(checkpoint):
        states = checkpoint["state"]
        states[first], states[second] = states[second], states[first]

    return spoil


def _quantized(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 says that they are deprecated
        return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


class Subclass(torch.Tensor):
    pass


OF_1 = r"of parameter 1 of group 0 must "
STEP = rf"step {OF_1}be an integer from 0 to 2\*\*53, or a tensor with one, but "
IN_1 = r"in group 1, "
# What does not fit, with the exception and its sentence.
REFUSED = {
    "None": (lambda _: None, TypeError, "the state dict must be a dict, but it is None"),
    "a list": (lambda _: [], TypeError, r"the state dict must be a dict, but it is \[\]"),
    "empty": (dict.clear, ValueError, "must have 'param_groups' and 'state', but it has no 'param_groups'"),
    "no state": (without("state"), ValueError, "must have 'param_groups' and 'state', but it has no 'state'"),
    "state None": (entry("state", None), TypeError, "state must be a dict, but it is None"),
    "state a list": (entry("state", [1]), TypeError, r"state must be a dict, but it is \[1\]"),
    "groups None": (entry("param_groups", None), TypeError, "param_groups must be a list, but it is None"),
    "groups a dict": (entry("param_groups", {}), TypeError, "param_groups must be a list, but it is {}"),
    "a group None": (entry("param_groups", [None, None]), TypeError, "group 0 must be a dict, but it is None"),
    "one group": (without("param_groups", 1), ValueError, "number of parameter groups: it has 1, .* optimizer has 2"),
    "three groups": (
        lambda checkpoint: checkpoint["param_groups"].append(checkpoint["param_groups"][0]),
        ValueError,
        "number of parameter groups: it has 3, .* optimizer has 2",
    ),
    "no params": (without("param_groups", 1, "params"), TypeError, "params of group 1 must be a list of ids"),
    "params a number": (option("params", 2), TypeError, "params of group 1 must be a list of ids, but it is 2"),
    "one param": (option("params", [2]), ValueError, "group 1 has 1 parameters there, and 2 in the optimizer"),
    "three params": (option("params", [2, 3, 4]), ValueError, "group 1 has 3 parameters there, and 2 in the optimizer"),
    "ids twice": (option("params", [2, 2]), ValueError, "parameter 1 of group 1 and .* different ids, but both have 2"),
    "ids of other group": (option("params", [0, 1]), ValueError, "parameter 0 of group 1 and parameter 0 of group 0"),
    "unhashable ids": (option("params", [[2], [3]]), TypeError, r"the id of parameter 0 of group 1 must .* is \[2\]"),
    "unknown ids": (
        option("params", [8, 9]),
        ValueError,
        "parameter with the id 2, which must be in params of a group",
    ),
    "a state None in a list": (
        lambda checkpoint: checkpoint["state"].update({1: [None]}),
        TypeError,
        "the state of parameter 1 of group 0 must be a dict, but it is",
    ),
    "a state a number": (
        lambda checkpoint: checkpoint["state"].update({1: 3}),
        TypeError,
        "the state of parameter 1 of group 0 must be a dict, but it is 3",
    ),
    "permuted": (_swap(0, 1), ValueError, "exp_avg of parameter 0 of group 0 must .* shape .* but its shape is"),
    "permuted groups": (_swap(0, 2), ValueError, r"parameter 0 of group 0 must .* \[3, 4\], but its shape is \[2, 3\]"),
    "no step": (without("state", 1, "step"), ValueError, f"the state {OF_1}have .*, but it has no step"),
    "no exp_avg": (without("state", 1, "exp_avg"), ValueError, f"the state {OF_1}have .*, but it has no exp_avg"),
    "no exp_avg_sq": (without("state", 1, "exp_avg_sq"), ValueError, f"{OF_1}have .*, but it has no exp_avg_sq"),
    "step None": (step(None), TypeError, STEP + "it is None"),
    "step a string": (step("3"), TypeError, STEP + "it is '3'"),
    "step a list": (step([3]), TypeError, STEP + r"it is \[3\]"),
    "step a Decimal": (step(Decimal(3)), TypeError, STEP + "it is Decimal"),
    "step True": (step(True), TypeError, STEP + "it is True"),
    "step a tensor of True": (step(torch.tensor(True)), TypeError, STEP + r"it is tensor\(True\)"),
    "step complex": (step(3j), TypeError, STEP + "it is 3j"),
    "step a complex tensor": (step(torch.tensor(3j)), TypeError, STEP + r"it is tensor\("),
    "step of 2 elements": (step(torch.ones(2)), ValueError, STEP + r"its shape is \[2\]"),
    "step of 0 elements": (step(torch.ones(0)), ValueError, STEP + r"its shape is \[0\]"),
    "step on meta": (step(torch.ones((), device="meta")), TypeError, STEP + "it is a Tensor of .* on meta"),
    "step sparse": (step(torch.ones(1).to_sparse()), TypeError, STEP + "it is a Tensor of .*sparse"),
    "step quantized": (step(_quantized(torch.ones(()))), TypeError, STEP + "it is a Tensor of torch.qint8"),
    "step a subclass": (step(torch.ones(()).as_subclass(Subclass)), TypeError, STEP + "it is a Subclass of"),
    "step nan": (step(torch.tensor(math.nan)), ValueError, STEP + r"it is tensor\(nan\)"),
    "step inf": (step(math.inf), ValueError, STEP + "it is inf"),
    "step negative": (step(torch.tensor(-5)), ValueError, STEP + r"it is tensor\(-5\)"),
    "step fractional": (step(2.5), ValueError, STEP + "it is 2.5"),
    "step 2**53 + 1": (step(2**53 + 1), ValueError, STEP + f"it is {2**53 + 1}"),
    "step 10**400": (step(10**400), ValueError, STEP + "it is 1000"),
    "exp_avg None": (state("exp_avg", lambda _: None), TypeError, f"exp_avg {OF_1}be a tensor, but it is None"),
    "exp_avg a list": (state("exp_avg", torch.Tensor.tolist), TypeError, rf"exp_avg {OF_1}be a tensor, but it is \["),
    "exp_avg an array": (state("exp_avg", lambda _: np.ones(3)), TypeError, f"exp_avg {OF_1}be a tensor, but it is"),
    "exp_avg longer": (state("exp_avg", lambda _: torch.ones(4)), ValueError, r"\[3\], but its shape is \[4\]"),
    "exp_avg of [3, 1]": (state("exp_avg", lambda _: torch.ones(3, 1)), ValueError, r"but its shape is \[3, 1\]"),
    "exp_avg a scalar": (state("exp_avg", lambda _: torch.ones(())), ValueError, r"but its shape is \[\]"),
    "exp_avg empty": (state("exp_avg", lambda _: torch.ones(0)), ValueError, r"but its shape is \[0\]"),
    "exp_avg on meta": (state("exp_avg", lambda old: old.to("meta")), ValueError, "be on cpu, .* but it is on meta"),
    "exp_avg quantized": (state("exp_avg", _quantized), ValueError, f"exp_avg {OF_1}have a real .* has torch.qint8"),
    "exp_avg complex": (state("exp_avg", lambda old: old.to(torch.complex64)), ValueError, "has torch.complex64"),
    "exp_avg integer": (state("exp_avg", torch.Tensor.long), ValueError, f"exp_avg {OF_1}have a real .* torch.int64"),
    "exp_avg bool": (state("exp_avg", torch.Tensor.bool), ValueError, "but it has torch.bool"),
    "exp_avg sparse": (state("exp_avg", torch.Tensor.to_sparse), ValueError, "be dense, but it is torch.sparse_coo"),
    "exp_avg a subclass": (
        state("exp_avg", lambda old: old.as_subclass(Subclass)),
        ValueError,
        "exp_avg of parameter 1 of group 0 must be a Tensor, as its parameter is, but it is a Subclass",
    ),
    "exp_avg_sq longer": (state("exp_avg_sq", lambda _: torch.ones(4)), ValueError, f"exp_avg_sq {OF_1}have the shape"),
    "ema_params a number": (state("ema_params", lambda _: 1.0), TypeError, f"ema_params {OF_1}be a tensor, .* is 1.0"),
    "ema_params longer": (state("ema_params", lambda _: torch.ones(4)), ValueError, f"ema_params {OF_1}have the shape"),
    "master_params None": (
        lambda checkpoint: checkpoint["state"][1].update(master_params=None),
        TypeError,
        f"master_params {OF_1}be a tensor, but it is None",
    ),
    "master_params longer": (
        lambda checkpoint: checkpoint["state"][1].update(master_params=torch.ones(4)),
        ValueError,
        f"master_params {OF_1}have the shape",
    ),
    "lr None": (option("lr", None), TypeError, IN_1 + "lr must be a number, but it is None"),
    "lr a string": (option("lr", "0.1"), TypeError, IN_1 + "lr must be a number, but it is '0.1'"),
    "lr nan": (option("lr", math.nan), ValueError, IN_1 + "lr must be finite and at least 0, but it is nan"),
    "lr negative": (option("lr", -1.0), ValueError, IN_1 + "lr must be finite and at least 0, but it is -1"),
    "lr complex": (option("lr", torch.tensor(1j)), TypeError, IN_1 + "lr must be a number"),
    "lr of 2 elements": (option("lr", torch.ones(2)), ValueError, IN_1 + r"lr must be .* its shape is \[2\]"),
    "lr on meta": (option("lr", torch.ones((), device="meta")), ValueError, IN_1 + "lr must .* but it is on meta"),
    "betas a number": (option("betas", 0.9), ValueError, IN_1 + "betas must be a pair of numbers, but it is 0.9"),
    "three betas": (option("betas", (0.9, 0.9, 0.9)), ValueError, IN_1 + "betas must be a pair of numbers"),
    "beta 1": (option("betas", (1.0, 0.9)), ValueError, IN_1 + r"beta1 must be in \[0, 1\), but it is 1.0"),
    "beta None": (option("betas", (0.9, None)), TypeError, IN_1 + "beta2 must be a number, but it is None"),
    "eps negative": (option("eps", -1e-8), ValueError, IN_1 + "eps must be finite and at least 0"),
    "eps a tensor": (option("eps", torch.ones(())), TypeError, IN_1 + "eps must be a number"),
    "weight_decay inf": (option("weight_decay", math.inf), ValueError, IN_1 + "weight_decay must be finite"),
    "ema_decay 2": (option("ema_decay", 2), ValueError, IN_1 + r"ema_decay must be in \[0, 1\], but it is 2"),
    "maximize 1": (option("maximize", 1), TypeError, IN_1 + "maximize must be True or False, but it is 1"),
    "master_weights None": (option("master_weights", None), TypeError, IN_1 + "master_weights must be True or False"),
    "ema_warmup another": (option("ema_warmup", "linear"), ValueError, IN_1 + "ema_warmup must be None, 'ratio' or"),
    "ema_warmup a list": (option("ema_warmup", []), ValueError, IN_1 + "ema_warmup must be None, 'ratio' or"),
    "ema_start_step 1.5": (option("ema_start_step", 1.5), TypeError, IN_1 + "ema_start_step must be an int"),
    "ema_update_every 0": (option("ema_update_every", 0), ValueError, IN_1 + "ema_update_every must be at least 1"),
    "amsgrad": (option("amsgrad", True), ValueError, "amsgrad=True in group 1, which this optimizer does not have"),
    "a step of a group of 2 elements": (
        lambda checkpoint: (option("step", torch.ones(2))(checkpoint), without("state", 2, "step")(checkpoint)),
        ValueError,
        r"step of parameter 0 of group 1 must be .* shape is \[2\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@each_configuration
def test_a_state_dict_that_does_not_fit_is_refused_and_leaves_the_optimizer_as_it_was(configuration, case):
    spoil, exception, sentence = REFUSED[case]
    run, checkpoint = Run(configuration, 3), checkpoint_of(configuration)
    result = spoil(checkpoint)
    checkpoint = result if case in ("None", "a list") else checkpoint
    before = run.objects()
    with pytest.raises(exception, match=f"^FusedEmaAdam.*{sentence}") as caught:
        run.optimizer.load_state_dict(checkpoint)
    assert caught.type is exception
    assert are_identical(run.objects(), before)
    assert are_same(run.contents(), undisturbed_contents(configuration, 3))
    run.train(3, first=3)
    assert are_same(run.contents(), undisturbed_contents(configuration, 6))


def _expanded(old):
    return old[:1].clone().expand(3)


def _in_inference_mode(old):
    with torch.inference_mode():
        return old.clone()


def _same_tensor_twice(checkpoint):
    checkpoint["state"][1]["exp_avg"].zero_()
    checkpoint["state"][1]["exp_avg_sq"] = checkpoint["state"][1]["exp_avg"]


def _two_zeros(checkpoint):
    checkpoint["state"][1]["exp_avg"].zero_()
    checkpoint["state"][1]["exp_avg_sq"].zero_()


# What is accepted, and a plain state dict with which training goes on as with it.
ACCEPTED = {
    "step an int": (step(7), step(torch.tensor(7.0))),
    "step of numpy": (step(np.float32(7)), step(torch.tensor(7.0))),
    "step in a tensor of [1, 1]": (step(torch.full((1, 1), 7.0)), step(torch.tensor(7.0))),
    "step bfloat16": (step(torch.tensor(7.0, dtype=torch.bfloat16)), step(torch.tensor(7.0))),
    "step 0": (step(0), step(torch.tensor(0.0))),
    "step 2**53": (step(2**53), step(torch.tensor(2.0**53))),
    "exp_avg float64": (state("exp_avg", torch.Tensor.double), state("exp_avg", lambda old: old)),
    "exp_avg requires grad": (state("exp_avg", nn.Parameter), state("exp_avg", lambda old: old)),
    "exp_avg with gaps": (
        state("exp_avg", lambda old: old.repeat_interleave(2)[::2]),
        state("exp_avg", lambda old: old),
    ),
    "exp_avg expanded": (state("exp_avg", _expanded), state("exp_avg", lambda old: _expanded(old).clone())),
    "exp_avg of inference mode": (state("exp_avg", _in_inference_mode), state("exp_avg", lambda old: old)),
    "exp_avg of nan": (
        state("exp_avg", lambda old: old * math.nan),
        state("exp_avg", lambda old: torch.full_like(old, math.nan)),
    ),
    "one tensor for two": (_same_tensor_twice, _two_zeros),
    "a parameter's state None": (lambda checkpoint: checkpoint["state"].update({1: None}), without("state", 1)),
    "a parameter's state empty": (lambda checkpoint: checkpoint["state"].update({1: {}}), without("state", 1)),
    "lr an int": (option("lr", 1), option("lr", 1.0)),
    "lr of numpy": (option("lr", np.float64(0.25)), option("lr", 0.25)),
    "lr in a tensor": (option("lr", torch.tensor([0.25], dtype=torch.float64)), option("lr", 0.25)),
    "betas a list": (option("betas", [0.8, 0.9]), option("betas", (0.8, 0.9))),
    "options missing": (without("param_groups", 1, "ema_decay"), option("ema_decay", 0.9)),
    "an option of another": (option("capturable", True), lambda _: None),
    "groups in a tuple": (
        lambda checkpoint: checkpoint.update(param_groups=tuple(checkpoint["param_groups"])),
        lambda _: None,
    ),
    "another entry": (entry("version", 3), lambda _: None),
    "a foreign entry": (lambda checkpoint: checkpoint["state"].update(name=1), lambda _: None),
}


@pytest.mark.parametrize("case", ACCEPTED)
@each_configuration
def test_a_state_dict_of_another_kind_trains_as_a_plain_one(configuration, case):
    unusual, plain = ACCEPTED[case]
    weights = []
    for change in (unusual, plain):
        run, checkpoint = Run(configuration, 3), checkpoint_of(configuration)
        change(checkpoint)
        run.optimizer.load_state_dict(checkpoint)
        run.train(3)
        with run.optimizer.swap_ema_params():
            averages = [param.detach().clone() for param in run.model.parameters()]
        weights.append([*averages, *(param.detach().clone() for param in run.model.parameters())])
    for result, expected in zip(*weights, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


class Stop(Exception):
    pass


def _stop(*_):
    raise Stop


@each_configuration
def test_a_pre_hook_that_raises_leaves_the_optimizer_as_it_was(configuration):
    run, checkpoint = Run(configuration, 3), checkpoint_of(configuration)
    before = run.objects()
    run.optimizer.register_load_state_dict_pre_hook(_stop)
    with pytest.raises(Stop):
        run.optimizer.load_state_dict(checkpoint)
    assert are_identical(run.objects(), before)


@each_configuration
def test_a_post_hook_that_raises_leaves_the_optimizer_with_all_of_the_new_state(configuration):
    run, loaded = Run(configuration, 3), Run(configuration, 3)
    run.optimizer.register_load_state_dict_post_hook(_stop)
    with pytest.raises(Stop):
        run.optimizer.load_state_dict(checkpoint_of(configuration))
    loaded.optimizer.load_state_dict(checkpoint_of(configuration))
    run.train(2)
    loaded.train(2)
    assert are_same(run.contents(), loaded.contents())


def test_hooks_see_the_state_dict_and_may_return_another_one():
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
def test_a_failure_of_any_operator_while_loading_leaves_the_optimizer_as_it_was(configuration):
    run, checkpoint = Run(configuration, 3), checkpoint_of(configuration)
    checkpoint["state"][1]["exp_avg"] = _expanded(checkpoint["state"][1]["exp_avg"])
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
        if frame.f_code.co_filename == _calls.__file__:
            return None  # Python handles no signal before the one call of C code that ends a call there
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
def test_an_interrupt_at_any_line_of_a_load_leaves_all_of_one_state(configuration):
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


@each_configuration
def test_after_a_refused_load_the_optimizer_can_be_copied_and_pickled(configuration):
    run = Run(configuration, 3)
    checkpoint = checkpoint_of(configuration)
    step(None)(checkpoint)
    with pytest.raises(TypeError):
        run.optimizer.load_state_dict(checkpoint)
    for again in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert are_same(again.contents(), run.contents())


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


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
        (0, None, "must be a DTensor, as its parameter is, but it is a Tensor"),
        (None, 0, "must be a Tensor, as its parameter is, but it is a DTensor"),
        (0, 1, r"must have the placements of its parameter \(Shard\(dim=0\),\), but it has \(Shard\(dim=1\),\)"),
        (0, 0, None),
    ],
    ids=["plain state", "plain parameter", "another placement", "the same placement"],
)
def test_states_have_to_be_sharded_as_their_parameters_are(mesh, dim_of_param, dim_of_state, sentence):
    weight, checkpoint = torch.ones(4, 4), FusedEmaAdam([param := nn.Parameter(torch.ones(4, 4))])
    param.grad = torch.ones(4, 4)
    checkpoint.step()
    contents = copy.deepcopy(checkpoint.state_dict())
    if dim_of_state is not None:
        contents = _sharded(contents, mesh, dim_of_state)
    optimizer = FusedEmaAdam([nn.Parameter(weight if dim_of_param is None else _sharded(weight, mesh, dim_of_param))])
    if sentence is None:
        optimizer.load_state_dict(contents)
        (state,) = optimizer.state.values()
        assert torch.equal(state["exp_avg"].full_tensor(), checkpoint.state[param]["exp_avg"])
        return
    with pytest.raises(ValueError, match=rf"exp_avg of parameter 0 of group 0 {sentence}"):
        optimizer.load_state_dict(contents)
    assert not optimizer.state


@each_configuration
def test_a_group_that_is_flattened_already_takes_the_loaded_state(configuration):
    run, fresh = Run(configuration, 3), Run(configuration, 0)
    checkpoint = checkpoint_of(configuration)
    fresh.model.load_state_dict(run.model.state_dict())
    for each in (run, fresh):
        each.optimizer.load_state_dict(copy.deepcopy(checkpoint))
        each.train(3)
    assert are_same(run.contents(), fresh.contents())
