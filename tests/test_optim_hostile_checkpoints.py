"""FusedEmaAdam: invalid state dicts raise, and unusual but valid ones are loaded."""

from __future__ import annotations

import math
from decimal import Decimal

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
    "one param": (option("params", [2]), ValueError, "group 1 has 1 parameters, and 2 in the optimizer"),
    "three params": (option("params", [2, 3, 4]), ValueError, "group 1 has 3 parameters, and 2 in the optimizer"),
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
    "permuted": (swap(0, 1), ValueError, "exp_avg of parameter 0 of group 0 must .* shape .* but its shape is"),
    "permuted groups": (swap(0, 2), ValueError, r"parameter 0 of group 0 must .* \[3, 4\], but its shape is \[2, 3\]"),
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
    "step quantized": (step(quantized(torch.ones(()))), TypeError, STEP + "it is a Tensor of torch.qint8"),
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
    "exp_avg quantized": (state("exp_avg", quantized), ValueError, f"exp_avg {OF_1}have a real .* has torch.qint8"),
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
    "amsgrad": (option("amsgrad", True), ValueError, "amsgrad=True in group 1, which this optimizer does not support"),
    "a step of a group of 2 elements": (
        lambda checkpoint: (option("step", torch.ones(2))(checkpoint), without("state", 2, "step")(checkpoint)),
        ValueError,
        r"step of parameter 0 of group 1 must be .* shape is \[2\]",
    ),
}


@each_configuration_and_case(REFUSED)
def test_an_invalid_state_dict_raises_and_leaves_the_optimizer_unchanged(configuration, case):
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
