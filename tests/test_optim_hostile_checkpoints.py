"""FusedEmaAdam: invalid state dicts raise, and unusual but valid ones are loaded."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from tests._checkpoint_runs import (
    Run,
    Subclass,
    are_identical,
    are_same,
    checkpoint_of,
    each_configuration_and_case,
    entry,
    expanded,
    option,
    quantized,
    state,
    step,
    swap,
    undisturbed_contents,
    without,
)

# What does not fit, with what its sentence names: the key, what is accepted and the value.
IS = ", but it is "
STEP = r"step of parameter 1 of group 0 must be an integer from 0 to 2\*\*53, or a tensor with one" + IS
OF_1 = "of parameter 1 of group 0 must be "
IN_1 = "in group 1, "
REFUSED = {
    "None": (lambda _: None, f"the state dict must be a dict{IS}None"),
    "a list": (lambda _: [], rf"the state dict must be a dict{IS}\[\]"),
    "empty": (dict.clear, f"param_groups must be a list of groups{IS}None"),
    "no state": (without("state"), f"state must be a dict{IS}None"),
    "state a list": (entry("state", [1]), rf"state must be a dict{IS}\[1\]"),
    "groups a dict": (entry("param_groups", {}), f"param_groups must be a list of groups{IS}{{}}"),
    "a group None": (entry("param_groups", [None, None]), f"group 0 must be a dict{IS}None"),
    "one group": (without("param_groups", 1), f"the number of groups must be 2, as in the optimizer{IS}1"),
    "no params": (without("param_groups", 1, "params"), f"params of group 1 must be a list of ids{IS}None"),
    "one param": (option("params", [2]), f"number of params of group 1 must be 2, as in the optimizer{IS}1"),
    "ids twice": (
        option("params", [2, 2]),
        f"the id of parameter 1 of group 1 must be another one than that of parameter 0 of group 1{IS}2",
    ),
    "ids of other group": (
        option("params", [0, 1]),
        f"the id of parameter 0 of group 1 must be another one than that of parameter 0 of group 0{IS}0",
    ),
    "unhashable ids": (
        option("params", [[2], [3]]),
        rf"the id of parameter 0 of group 1 must be an int or a str{IS}\[2\]",
    ),
    "unknown ids": (option("params", [8, 9]), f"key of a parameter's state must be an id in params of a group{IS}2"),
    "a state in a list": (
        lambda checkpoint: checkpoint["state"].update({1: [None]}),
        rf"the state {OF_1}a dict{IS}\[None\]",
    ),
    "permuted": (
        swap(0, 1),
        rf"exp_avg of parameter 0 of group 0 must be of its parameter's shape \[3, 4\]{IS}.*\[3\]",
    ),
    **{
        f"no {name}": (
            without("state", 1, name),
            f"the entries of the state {OF_1}all of step, exp_avg, exp_avg_sq or none of them{IS}.*{another}",
        )
        for name, another in (("step", "exp_avg"), ("exp_avg", "step"), ("exp_avg_sq", "step"))
    },
    "step None": (step(None), STEP + "None"),
    "step a string": (step("3"), STEP + "'3'"),
    "step True": (step(True), STEP + "True"),
    "step a tensor of True": (step(torch.tensor(True)), STEP + r"tensor\(True\)"),
    "step a complex tensor": (step(torch.tensor(3j)), STEP + r"tensor\("),
    "step of 2 elements": (step(torch.ones(2)), STEP + r"a Tensor of .*\[2\]"),
    "step on meta": (step(torch.ones((), device="meta")), STEP + "a Tensor of .* on meta"),
    "step sparse": (step(torch.ones(1).to_sparse()), STEP + "a Tensor of .*sparse"),
    "step quantized": (step(quantized(torch.ones(()))), STEP + "a Tensor of torch.qint8"),
    "step a subclass": (step(torch.ones(()).as_subclass(Subclass)), STEP + "a Subclass of"),
    "step nan": (step(torch.tensor(math.nan)), STEP + r"tensor\(nan\)"),
    "step negative": (step(torch.tensor(-5)), STEP + r"tensor\(-5\)"),
    "step fractional": (step(2.5), STEP + "2.5"),
    "step 2**53 + 1": (step(2**53 + 1), STEP + f"{2**53 + 1}"),
    "exp_avg None": (state("exp_avg", lambda _: None), f"exp_avg {OF_1}a tensor{IS}None"),
    "exp_avg an array": (state("exp_avg", lambda _: np.ones(3)), f"exp_avg {OF_1}a tensor{IS}array"),
    **{
        f"exp_avg of {list(shape)}": (
            state("exp_avg", lambda _, shape=shape: torch.ones(shape)),
            rf"exp_avg {OF_1}of its parameter's shape \[3\]{IS}.*{re.escape(found)}",
        )
        for shape, found in (((4,), "[4]"), ((3, 1), "[3, 1]"), ((), "tensor(1.)"), ((0,), "[0]"))
    },
    "exp_avg on meta": (state("exp_avg", lambda old: old.to("meta")), f"exp_avg {OF_1}on cpu .*{IS}.* on meta"),
    **{
        f"exp_avg {name}": (state("exp_avg", change), f"exp_avg {OF_1}real floating point{IS}a Tensor of {dtype}")
        for name, change, dtype in (
            ("quantized", quantized, torch.qint8),
            ("complex", lambda old: old.to(torch.complex64), torch.complex64),
            ("integer", torch.Tensor.long, torch.int64),
            ("bool", torch.Tensor.bool, torch.bool),
        )
    },
    "exp_avg sparse": (state("exp_avg", torch.Tensor.to_sparse), f"exp_avg {OF_1}dense{IS}.*torch.sparse_coo"),
    "exp_avg a subclass": (
        state("exp_avg", lambda old: old.as_subclass(Subclass)),
        f"exp_avg {OF_1}a Tensor, as its parameter is{IS}a Subclass",
    ),
    "ema_params longer": (state("ema_params", lambda _: torch.ones(4)), f"ema_params {OF_1}of its parameter's shape"),
    "master_params None": (
        lambda checkpoint: checkpoint["state"][1].update(master_params=None),
        f"master_params {OF_1}a tensor{IS}None",
    ),
    # The rules of all options: test_optim_options.py and test_optim_averages.py.
    "lr nan": (option("lr", math.nan), f"{IN_1}lr must be finite and at least 0{IS}nan"),
    "lr on meta": (
        option("lr", torch.ones((), device="meta")),
        f"lr of group 1 must be a number or a tensor with one{IS}.* on meta",
    ),
    "betas a number": (option("betas", 0.9), f"{IN_1}betas must be a pair of numbers{IS}0.9"),
    "amsgrad": (option("amsgrad", True), f"{IN_1}amsgrad must be False{IS}True"),
    "a step of a group of 2 elements": (
        lambda checkpoint: (option("step", torch.ones(2))(checkpoint), without("state", 2, "step")(checkpoint)),
        rf"step of parameter 0 of group 1 must be .*{IS}a Tensor of .*\[2\]",
    ),
}


@each_configuration_and_case(REFUSED)
def test_an_invalid_state_dict_raises_and_leaves_the_optimizer_unchanged(configuration, case):
    spoil, sentence = REFUSED[case]
    run, checkpoint = Run(configuration, 3), checkpoint_of(configuration)
    result = spoil(checkpoint)
    checkpoint = result if case in ("None", "a list") else checkpoint
    before = run.objects()
    with pytest.raises((TypeError, ValueError), match=f"^FusedEmaAdam.load_state_dict: .*{sentence}"):
        run.optimizer.load_state_dict(checkpoint)
    assert are_identical(run.objects(), before)
    assert are_same(run.contents(), undisturbed_contents(configuration, 3))
    run.train(3, first=3)
    assert are_same(run.contents(), undisturbed_contents(configuration, 6))


def _in_inference_mode(old):
    with torch.inference_mode():
        return old.clone()


def _same_tensor_twice(checkpoint):
    checkpoint["state"][1]["exp_avg"].zero_()
    checkpoint["state"][1]["exp_avg_sq"] = checkpoint["state"][1]["exp_avg"]


def _two_zeros(checkpoint):
    checkpoint["state"][1]["exp_avg"].zero_()
    checkpoint["state"][1]["exp_avg_sq"].zero_()


# Accepted state dicts, each with an equivalent plain one.
ACCEPTED = {
    "step an int": (step(7), step(torch.tensor(7.0))),
    "step a float": (step(7.0), step(torch.tensor(7.0))),
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
    "exp_avg expanded": (state("exp_avg", expanded), state("exp_avg", lambda old: expanded(old).clone())),
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


@each_configuration_and_case(ACCEPTED)
def test_an_unusual_but_valid_state_dict_trains_like_a_plain_one(configuration, case):
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
