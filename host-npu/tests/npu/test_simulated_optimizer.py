"""CANN's function ApplyFusedEmaAdam, against float64."""

import pytest
import torch
from tests._aclnn import call
from tests._values import DTYPES, assert_close, random, transposed

_LR, _EMA, _BETA1, _BETA2, _EPS, _WEIGHT_DECAY = 0.01, 0.9, 0.9, 0.999, 1e-8, 0.1


def _step(grad, states, step, mode=1, bias_correction=True):
    numbers = _LR, _EMA, _BETA1, _BETA2, _EPS, mode, bias_correction, _WEIGHT_DECAY
    call("aclnnApplyFusedEmaAdam", grad, *states, step.npu(), *numbers)


@DTYPES
@pytest.mark.parametrize("place", [torch.Tensor.npu, transposed], ids=["contiguous", "strided"])
@pytest.mark.parametrize("bias_correction", [False, True])
# A mode that does not exist uses the gradient in place of the parameter.
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_step_is_adams_with_an_average(mode, bias_correction, place, dtype):
    grad, *states = (random((3, 700), dtype, low, high) for low, high in ((-1, 1), (-1, 1), (-1, 1), (0, 2), (-1, 1)))
    on_npu = [place(state) for state in states]
    # Only the first element is used.
    _step(place(grad), on_npu, torch.tensor([7, 99]), mode, bias_correction)
    g, var, m, v, s = (each.double() for each in (grad, *states))
    c1, c2 = (1 - beta**7 if bias_correction else 1 for beta in (_BETA1, _BETA2))
    old = var if mode in (0, 1) else g
    g = g + _WEIGHT_DECAY * old if mode == 0 else g
    m, v = _BETA1 * m + (1 - _BETA1) * g, _BETA2 * v + (1 - _BETA2) * g * g
    change = m / c1 / ((v / c2).sqrt() + _EPS)
    var = old - _LR * (change + _WEIGHT_DECAY * old if mode == 1 else change)
    s = _EMA * s + (1 - _EMA) * var
    # 1 - beta2 loses digits in float32.
    roundings = 20 if dtype == torch.float32 else 1
    for found, expected in zip(on_npu, (var, m, v, s), strict=True):
        assert_close(found, expected, roundings)


def test_beta_is_subtracted_in_float32():
    states = [torch.zeros(8).npu() for _ in range(4)]
    _step(torch.ones(8).npu(), states, torch.tensor([10]))
    assert states[2].cpu().equal(torch.full((8,), 1 - torch.tensor(_BETA2)))


def test_a_step_of_number_0_divides_by_zero():
    states = [torch.ones(8).npu() for _ in range(4)]
    _step(torch.ones(8).npu(), states, torch.tensor([0]))
    assert not states[0].isfinite().any()
