"""Documented properties of norms apart from their formula: statistics, optional outputs, chips."""

import pytest
import torch
import torch_npu
from tests._aclnn import call
from tests._process import on_npu
from torch.nn.functional import rms_norm

_EPSILON = 1e-6


def _close(actual, expected, limit=2e-6):
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=["without ones", "with ones"])
def test_the_gradient_takes_statistics_of_rows_in_both_shapes(shape):
    # As many rows as columns, so that the size does not reveal a wrong dimension.
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    gamma, dy = torch.randn(4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    rms_norm(x, (4,), gamma, _EPSILON).backward(dy)
    rstd = (x.detach().square().mean(-1) + _EPSILON).rsqrt().view(shape)
    dx, dgamma = torch.empty(4, 4, device="npu"), torch.empty(4, device="npu")
    call("aclnnRmsNormGrad", *[each.detach().float().npu() for each in (dy, x, rstd, gamma)], dx, dgamma)
    _close(dx, x.grad)


@pytest.mark.parametrize("with_sum", [False, True])
def test_the_sum_and_its_statistics_may_be_absent(with_sum):
    x1, x2, gamma = torch.randn(3, 8).half(), torch.randn(3, 8).half(), torch.randn(1, 8).half()
    y, total = torch.empty(3, 8, device="npu").half(), torch.empty(3, 8, device="npu").half()
    on_npu = [each.npu() for each in (x1, x2, gamma)]
    call("aclnnAddRmsNorm", *on_npu, _EPSILON, y, None, total if with_sum else None)
    rounded = (x1.double() + x2.double()).half()
    _close(y, rms_norm(rounded.double(), (8,), gamma[0].double(), _EPSILON), 2**-9)
    if with_sum:
        assert total.cpu().equal(rounded)


def _rstd_of_a_sum() -> float:
    x1, x2 = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.0]]).bfloat16()
    return torch_npu.npu_add_rms_norm(x1.npu(), x2.npu(), torch.ones(2).bfloat16().npu())[1].item()


@pytest.mark.parametrize(("soc", "first"), [("Ascend910B", 256), ("Ascend910_93", 256), ("Ascend950", 257)])
def test_a2_and_a3_round_the_sum_before_they_normalize_it(soc, first):
    rstd = on_npu(_rstd_of_a_sum, HOST_NPU_SOC=soc)
    assert rstd == pytest.approx(((first**2 + 1) / 2) ** -0.5, rel=1e-6)
