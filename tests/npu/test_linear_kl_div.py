"""linear_kl_div on an NPU: the results of a CPU, in torch_npu's operators."""

import math

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
