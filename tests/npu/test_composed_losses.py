"""Losses that CANN has no operator for on an NPU: divergences, preferences and policies have the results of a CPU."""

import math
from functools import partial

import torch_aclnn_ops
from torch_aclnn_ops import functional as F

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests._linear_kl_div import DIVERGENCES, REDUCED, ROWS, TARGET, head_of_teacher, results, student, teacher
from tests.npu._operators import checked_values


def _results(device, divergence, kind, dtype=torch.float32, **options):
    of_student = [one.detach().to(device).requires_grad_() for one in student(dtype)]
    given, options = tree_map_only(torch.Tensor, lambda one: one.to(device), (teacher(kind, dtype=dtype), options))
    return [one.detach().cpu() for one in results(of_student, divergence, given, **options)]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["head", "probabilities", "some classes"])
@pytest.mark.parametrize("options", ["ignored rows", "ignored rows, none", "hard labels"])
def test_the_results_are_those_of_a_cpu(divergence, kind, options):
    options = {"temperature": 2.0, "chunk_size": 4, **REDUCED[options]}
    found, expected = (_results(device, divergence, kind, **options) for device in ("npu", "cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_give_a_float32_loss(dtype):
    found, expected = (_results(device, "reverse_kl", "head", dtype) for device in ("npu", "cpu"))
    assert found[0].dtype == torch.float32 and [one.dtype for one in found[1:]] == [dtype] * 3
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


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
    with checked_values(), pytest.raises(IndexError, match="must have classes from 0 to 22, but it has the row"):
        F.linear_kl_div(input, weight, teacher_top_k=some)


def test_explain_says_that_cann_has_no_operator():
    npu = [one.npu() for one in (*student(torch.float32)[:2], *head_of_teacher(torch.float32)[:2])]
    said = torch_aclnn_ops.explain(F.linear_kl_div, *npu)
    assert said.startswith("linear_kl_div: PyTorch fallback, because CANN has no operator for it; gradients with")


SEQUENCES, TOKENS = 4, 6
MASK = torch.arange(TOKENS) < torch.tensor([[6], [3], [1], [0]])
DPO = {name: {} for name in "sigmoid hinge ipo nca_pair bco_pair sppo_hard apo_zero apo_down discopop".split()}
DPO |= {name: {"label_smoothing": 0.1} for name in ("robust", "exo_pair")}
GRPO = {
    "clip": {"delta": 1.5, "beta": 0.1},
    "sequences": {"importance": "sequence", "epsilon_high": 0.3},
    "LUSPO": {"importance": "sequence", "reduction": "constant", "length": 1},
    "cispo": {"loss_type": "cispo", "delta": 1.3},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo", "beta": 0.1, "is_kl_corrected": True},
    "not reduced": {"reduction": "none"},
    "of a batch": {"reduction": "token", "num_items_in_batch": 20.0},
}


def _draw(*shape, seed):
    return -torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).abs()


def _dpo(device, dtype, **options):
    policy, *others = [_draw(SEQUENCES, seed=seed).to(device, dtype) for seed in range(4)]
    policy.requires_grad_()
    return policy, F.dpo_loss(policy, *others, beta=0.3, **options)


def _kto(device, dtype, **options):
    policy, reference = [_draw(SEQUENCES, seed=seed).to(device, dtype) for seed in range(2)]
    policy.requires_grad_()
    desirable = torch.tensor([True, False, False, True], device=device)
    return policy, F.kto_loss(policy, reference, desirable, torch.tensor(-0.2, device=device), **options)


def _grpo(device, dtype, **options):
    policy, old, reference, sampler = [_draw(SEQUENCES, TOKENS, seed=seed).to(device, dtype) for seed in range(4)]
    policy.requires_grad_()
    others = {"old_log_probs": old, "reference_log_probs": reference, "sampler_log_probs": sampler}
    advantages = torch.linspace(-1, 1, SEQUENCES, device=device)
    return policy, F.grpo_loss(policy, advantages, MASK.to(device), **others, **options)


LOSSES = {
    **{f"dpo, {name}": partial(_dpo, loss_type=name, **options) for name, options in DPO.items()},
    **{f"kto, {clamped}": partial(_kto, clamp_kl=clamped) for clamped in (True, False)},
    **{f"grpo, {name}": partial(_grpo, **options) for name, options in GRPO.items()},
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
