"""Losses without a CANN operator on an NPU: divergences, preferences and policies give the CPU's results."""

import math
from functools import partial

import torch_aclnn_ops
from torch_aclnn_ops import functional as F

import pytest
import torch

from tests import test_policy_losses as policies
from tests import test_preference_losses as preferences
from tests._linear_kl_div import ROWS, TARGET, head_of_teacher, student
from tests.npu._operators import checked_values


def test_what_is_not_finite_in_an_ignored_row_stays_there():
    (input, weight, _), (rows, head, _) = student(torch.float32), head_of_teacher(torch.float32)
    npu = [one.detach().npu() for one in (input, weight, rows, head)]
    expected = F.linear_kl_div(*npu, target=TARGET.npu()).cpu()
    npu[0][3], npu[2][3] = math.nan, math.inf
    npu[0].requires_grad_()
    loss = F.linear_kl_div(*npu, target=TARGET.npu())
    torch.testing.assert_close(loss.detach().cpu(), expected)
    assert torch.autograd.grad(loss, npu[0])[0].cpu().isfinite().all()


def test_a_class_that_is_none_makes_the_loss_nan_and_is_refused_where_values_are_checked():
    input, weight = (one.detach().npu() for one in student(torch.float32)[:2])
    some = torch.full((ROWS, 2), 99).npu(), torch.full((ROWS, 2), -1.0).npu()
    assert F.linear_kl_div(input, weight, teacher_top_k=some).cpu().isnan()
    with checked_values(), pytest.raises(IndexError, match="must have classes from 0 to 23, but it has the row"):
        F.linear_kl_div(input, weight, teacher_top_k=some)


def test_explain_says_that_cann_has_no_operator():
    npu = [one.npu() for one in (*student(torch.float32)[:2], *head_of_teacher(torch.float32)[:2])]
    said = torch_aclnn_ops.explain(F.linear_kl_div, *npu)
    assert said.startswith("linear_kl_div: PyTorch fallback, because CANN has no operator for it; gradients with")


def _leaf(values, device, dtype):
    return values.detach().to(device, dtype).requires_grad_()


def _of_pairs(name, device, dtype):
    function, _, number = preferences.FORMULAS[name]
    policy, *others = (_leaf(one, device, dtype) for one in preferences.log_probs(number))
    return policy, function(policy, *(one.detach() for one in others))


def _kto(clamp_kl, device, dtype):
    policy, reference = (_leaf(one, device, dtype) for one in preferences.log_probs(2))
    desirable = torch.arange(preferences.PAIRS, device=device) % 3 == 0
    kl = torch.tensor(-0.2, device=device)
    return policy, F.kto_loss(policy, reference.detach(), desirable, kl, clamp_kl=clamp_kl)


def _of_policy(name, reduction, device, dtype):
    loss_type, options, _ = policies.VARIANTS[name]
    policy, *others = (_leaf(one, device, dtype) for one in policies.four_log_probs())
    names = ("old_log_probs", "sampler_log_probs", "reference_log_probs")
    tensors = dict(zip(names, (one.detach() for one in others), strict=True))
    advantages, mask = policies.draw(policies.SEQUENCES, seed=5).to(device, dtype), policies.MASK.bool().to(device)
    options = {"beta": 0.1, "sampler_cap": 1.2, "is_kl_corrected": True, **options, **reduction}
    return policy, F.grpo_loss(policy, advantages, mask, loss_type=loss_type, **tensors, **options)


REDUCTIONS = [{}, {"reduction": "none", "length": None}, {"reduction": "token", "length": None}]
REDUCTIONS.append({**REDUCTIONS[-1], "num_items_in_batch": 20.0})
LOSSES = {
    **{name: partial(_of_pairs, name) for name in preferences.FORMULAS},
    **{f"kto, {clamped}": partial(_kto, clamped) for clamped in (True, False)},
    **{f"{name}, {given}": partial(_of_policy, name, given) for name in policies.VARIANTS for given in REDUCTIONS},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_loss_and_its_gradient_are_those_of_a_cpu(loss, dtype):
    found = []
    for device in ("npu", "cpu"):
        policy, value = loss(device, dtype)
        [gradient] = torch.autograd.grad(value.sum(), policy)
        found.append((value.detach().cpu(), gradient.cpu()))
    torch.testing.assert_close(*found, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-5)
