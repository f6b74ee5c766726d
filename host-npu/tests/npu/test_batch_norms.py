"""Batch norm in steps, as SyncBatchNorm uses it, on the host NPU against float64."""

import pytest
import torch
import torch_npu  # noqa: F401
from tests._values import assert_near
from torch import Tensor

_EPSILON, _MOMENTUM = 1e-5, 0.1
_SHAPE = 5, 3, 4, 6
_DIMS = (0, 2, 3)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    return x.mean(_DIMS), (x.var(_DIMS, correction=0) + _EPSILON).rsqrt()


def test_statistics_of_a_rank_are_those_of_float64():
    x = torch.randn(_SHAPE)
    for actual, expected in zip(torch.batch_norm_stats(x.npu(), _EPSILON), _moments(x), strict=True):
        assert_near(actual, expected, units=2)


def test_sums_of_a_rank_are_those_of_float64():
    x = torch.randn(_SHAPE)
    total, squares = torch.ops.npu.batch_norm_reduce(x.npu(), _EPSILON)
    assert_near(total, x.double().sum(_DIMS), units=16)
    assert_near(squares, x.double().square().sum(_DIMS), units=2)


def _assert_those_of_all_rows(results, running, parts, units):
    together = torch.cat(parts).double()
    for actual, expected in zip(results, _moments(together), strict=True):
        assert_near(actual, expected, units=units)
    assert_near(running[0], 0.9 + 0.1 * together.mean(_DIMS), units=2)
    assert_near(running[1], 1.8 + 0.1 * together.var(_DIMS), units=2)


def test_statistics_of_ranks_are_those_of_all_rows():
    parts = [torch.randn(size, *_SHAPE[1:]) + size for size in (2, 5)]
    means, invstds = (torch.stack(each).float() for each in zip(*map(_moments, parts), strict=True))
    counts = torch.tensor([part.numel() / _SHAPE[1] for part in parts])
    running = [torch.ones(3).npu(), torch.ones(3).npu() * 2]
    results = torch.batch_norm_gather_stats_with_counts(
        parts[0].npu(), means.npu(), invstds.npu(), *running, _MOMENTUM, _EPSILON, counts.npu()
    )
    _assert_those_of_all_rows(results, running, parts, units=2)


def test_sums_of_ranks_are_those_of_all_rows():
    parts = [torch.randn(size, *_SHAPE[1:]) for size in (2, 5)]
    sums, squares = (torch.stack([power(part).sum(_DIMS) for part in parts]) for power in (torch.clone, torch.square))
    counts = torch.tensor([part.numel() // _SHAPE[1] for part in parts], dtype=torch.int32)
    running = [torch.ones(3).npu(), torch.ones(3).npu() * 2]
    results = torch.ops.npu.batch_norm_gather_stats_update(
        parts[0].npu(), sums.npu(), squares.npu(), *running, _MOMENTUM, _EPSILON, counts.npu()
    )
    # The means are near 0, so their error is relative to the sums.
    _assert_those_of_all_rows(results, running, parts, units=8)


@pytest.mark.parametrize("affine", [True, False])
def test_elements_and_gradients_are_those_of_float64(affine):
    x, dy = torch.randn(_SHAPE), torch.randn(_SHAPE)
    weight, bias = (torch.randn(3), torch.randn(3)) if affine else (None, None)
    reference = [None if each is None else each.double().requires_grad_() for each in (x, weight, bias)]
    expected = torch.nn.functional.batch_norm(reference[0], None, None, *reference[1:], training=True, eps=_EPSILON)
    expected.backward(dy.double())

    mean, invstd = (each.float().npu() for each in _moments(x))
    on_npu = [None if each is None else each.npu() for each in (x, weight, bias)]
    assert_near(torch.batch_norm_elemt(on_npu[0], *on_npu[1:], mean, invstd, _EPSILON), expected.detach(), units=2)
    sums = torch.batch_norm_backward_reduce(dy.npu(), on_npu[0], mean, invstd, on_npu[1], True, affine, affine)
    counts = torch.tensor([60, 60], dtype=torch.int32).npu()
    dx = torch.batch_norm_backward_elemt(dy.npu(), on_npu[0], mean, invstd, on_npu[1], *sums[:2], counts)
    assert_near(dx, reference[0].grad, units=4)
    if affine:
        assert_near(sums[2], reference[1].grad, units=4)
        assert_near(sums[3], reference[2].grad, units=4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_elements_of_16_bits_take_a_weight_of_float32(dtype):
    x, weight, bias = torch.randn(_SHAPE).to(dtype), torch.randn(3), torch.randn(3)
    mean, invstd = (each.float() for each in _moments(x))
    expected = torch.nn.functional.batch_norm(
        x.double(), None, None, weight.double(), bias.double(), training=True, eps=_EPSILON
    )
    on_npu = [each.npu() for each in (x, weight, bias, mean, invstd)]
    assert_near(torch.batch_norm_elemt(*on_npu, _EPSILON), expected, units=1)
