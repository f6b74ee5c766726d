"""CANN's functions of linear cross entropy, against float64."""

import ctypes

import pytest
import torch
from tests._aclnn import call, phase_one
from tests._values import DTYPES, assert_close, random

# Rows, hidden size, vocabulary: around the tiles of 128 x 256 and of the matrix product.
_PROBLEMS = pytest.mark.parametrize(
    ("dtype", "rows", "hidden", "vocabulary"),
    [(torch.float16, 13, 7, 130), (torch.bfloat16, 150, 33, 300), (torch.bfloat16, 1, 1, 257)],
    ids=str,
)
_SMOOTHING = ctypes.c_float(0)


def _bits(mask):
    """Pack eight bits of a mask into each byte, the first in the lowest bit."""
    return (mask.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)


def _max_sum(x, weight, target, start, end, logits=None):
    rows = x.shape[0]
    vectors = [torch.full((rows,), -9.0).npu() for _ in range(3)]
    mask = torch.full(((rows + 7) // 8,), 255, dtype=torch.uint8).npu()
    masked = torch.full((rows,), -9, dtype=target.dtype).npu()
    given = x.npu(), weight.npu(), target.npu(), start, end, *vectors, mask, masked, logits
    call("aclnnFusedLinearOnlineMaxSum", *given)
    return [each.cpu() for each in (*vectors, mask, masked)]


@_PROBLEMS
@pytest.mark.parametrize("start", [0, 1000])
def test_the_statistics_of_logits(start, dtype, rows, hidden, vocabulary):
    x, weight = random((rows, hidden), dtype, -1, 1), random((vocabulary, hidden), dtype, -1, 1)
    target = start + torch.arange(rows) * 37 % (vocabulary + 20) - 10
    end = start + vocabulary
    logits = torch.empty(rows, vocabulary, dtype=dtype).npu()
    found = _max_sum(x, weight, target, start, end, logits)
    assert_close(logits, x.double() @ weight.double().t())
    # The statistics are those of the rounded logits.
    wide = logits.cpu().double()
    top = wide.amax(1)
    inside = (target >= start) & (target < end)
    ids = (target - start).where(inside, 0)
    # Bits beyond the last row are as for a target of 0.
    bits = torch.cat([~inside, torch.full((-rows % 8,), not start <= 0 < end)])
    most, total, predicted, mask, masked = found
    assert most.double().equal(top)
    assert_close(total, (wide - top[:, None]).exp().sum(1), 10)
    assert_close(predicted, (wide[torch.arange(rows), ids] - top).where(inside, 0))
    assert mask.equal(_bits(bits)) and masked.equal(ids)
    assert all(one.equal(other) for one, other in zip(_max_sum(x, weight, target, start, end), found, strict=True))


_ONES = torch.ones(3, 4).half(), torch.ones(5, 4).half()


def test_targets_are_compared_and_subtracted_in_float32():
    # In float32, 2^24 + 1 equals 2^24, so start and end are equal.
    *_, mask, _ = _max_sum(*_ONES, torch.tensor([2**24 + 1, 2**24, 2**24 - 1]), 2**24, 2**24 + 1)
    assert mask.tolist() == [255]
    # 2^24 + 3 becomes 2^24 + 4.
    *_, masked = _max_sum(*_ONES, torch.tensor([2**24, 2**24 + 1, 2**24 + 3]), 2**24, 2**24 + 14)
    assert masked.tolist() == [0, 0, 4]


def test_the_sum_of_many_columns_is_exact():
    # As many columns as a large language model has: a sequential sum was 3.5e-4 off.
    x, weight = random((2, 1), torch.float16, -1, 1), random((151936, 1), torch.float16, -1, 1)
    logits = torch.empty(2, 151936, dtype=torch.float16).npu()
    top, total, *_ = _max_sum(x, weight, torch.tensor([0, 0]), 0, 151936, logits)
    expected = (logits.cpu().double() - top.double()[:, None]).exp().sum(1)
    torch.testing.assert_close(total.double(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("place", [0, 2, 4], ids=["first", "middle", "last"])
def test_nan_is_the_largest_logit(place):
    x, weight = torch.ones(3, 4).half(), torch.ones(5, 4).half()
    weight[place, 0] = torch.nan
    for vector in _max_sum(x, weight, torch.ones(3, dtype=torch.int32), 0, 5)[:3]:
        assert vector.isnan().all()


@DTYPES
def test_the_losses_and_the_softmax_of_statistics(dtype):
    logits = random((9, 70), dtype, -5, 5)
    top, total, predicted = (random((9,), torch.float32, *bounds) for bounds in ((4, 5), (1, 10), (-5, 0)))
    loss, softmax = torch.empty(9).npu(), torch.empty(9, 70).npu()
    vectors = [each.npu() for each in (top, total, predicted)]
    call("aclnnFusedCrossEntropyLossWithMaxSum", *vectors, _SMOOTHING, None, None, logits.npu(), loss, softmax)
    assert_close(loss, total.double().log() - predicted.double())
    assert_close(softmax, (logits.double() - top.double()[:, None]).exp() / total.double()[:, None])


@_PROBLEMS
@pytest.mark.parametrize("packs", [False, True], ids=["mask of bool", "mask of bits"])
@pytest.mark.parametrize("has_softmax", [False, True])
def test_the_gradients_of_a_head(has_softmax, packs, dtype, rows, hidden, vocabulary):
    x, weight = random((rows, hidden), dtype, -1, 1), random((vocabulary, hidden), dtype, -1, 1)
    exact = x.double() @ weight.double().t()
    softmax, grad = exact.softmax(1), random((rows,), torch.float32, -1, 1)
    masked = torch.arange(rows) % 3 == 1
    # The targets of masked rows do not matter.
    target = (torch.arange(rows) * 41 % vocabulary).where(~masked, -100)
    # Bits beyond the last row are ignored, and there may be any number of them.
    bits = _bits(torch.cat([masked, torch.zeros(-rows % 8, dtype=torch.bool)]))
    mask = torch.cat([bits, torch.tensor([170], dtype=torch.uint8)]) if packs else masked
    given = softmax.float().npu() if has_softmax else None
    top = exact.amax(1)
    statistics = top.float().npu(), (exact - top[:, None]).exp().sum(1).float().npu()
    outs = [torch.empty_like(each).npu() for each in (x, weight)]
    inputs = [each.npu() for each in (grad, x, weight, mask, target)]
    statistics = (None, None) if has_softmax else statistics
    call("aclnnFusedLinearCrossEntropyLossGrad", *inputs, _SMOOTHING, *statistics, given, *outs)
    less_one = softmax.clone()
    less_one[(~masked).nonzero()[:, 0], target[~masked]] -= 1
    gradients = less_one * grad.double()[:, None]
    # The gradients are rounded to 16 bits before the products.
    assert_close(outs[0], gradients @ weight.double(), 3)
    assert_close(outs[1], gradients.t() @ x.double(), 3)
    if has_softmax:
        _assert_packed(given, gradients, less_one, dtype)


def _assert_packed(softmax, gradients, less_one, dtype):
    """Assert that a softmax holds the gradients in 16 bits, rows aligned to 512 bytes, and then its previous values."""
    rows, vocabulary = gradients.shape
    pitch = -(-vocabulary // 256) * 256
    memory = softmax.cpu().flatten()
    packed = memory.view(dtype)[: rows * pitch].view(rows, pitch)[:, :vocabulary]
    assert_close(packed, gradients)
    behind = slice(-(-rows * pitch // 2), None)
    assert_close(memory[behind], less_one.flatten()[behind])


def _of_three_rows(targets=(0, 1, 129), smoothing=0.0, softmax=True, **changed):
    """Return the arguments of a gradient for 3 rows and 130 logits."""
    x, weight = torch.ones(3, 4).bfloat16().npu(), torch.ones(130, 4).bfloat16().npu()
    given = {"grad": torch.ones(3).npu(), "x": x, "weight": weight, "mask": torch.zeros(3, dtype=torch.bool).npu()}
    statistics = (None, None) if softmax else (torch.full((3,), 4.0).npu(), torch.full((3,), 130.0).npu())
    softmax = torch.full((130, 3), 0.5).npu().t() if softmax else None
    given |= {"targets": torch.tensor(targets).npu(), "smoothing": ctypes.c_float(smoothing)} | changed
    return *given.values(), *statistics, softmax, torch.empty_like(x), torch.empty_like(weight)


def test_a_strided_softmax_is_copied():
    arguments = _of_three_rows()
    call("aclnnFusedLinearCrossEntropyLossGrad", *arguments)
    assert (arguments[8] == 0.5).all()


def test_a_target_outside_of_the_softmax_is_a_fault_and_without_one_no_tile_has_it():
    with pytest.raises(RuntimeError, match="error code is 507015"):
        call("aclnnFusedLinearCrossEntropyLossGrad", *_of_three_rows((0, -100, 1)))
    call("aclnnFusedLinearCrossEntropyLossGrad", *_of_three_rows((0, -100, 130), softmax=False))


def test_a_missing_softmax_is_refused_first_and_smoothing_before_shapes():
    name = "aclnnFusedLinearCrossEntropyLossGrad"
    assert "softmax" in phase_one(name, *_of_three_rows(grad=None)[:8], None, *_of_three_rows()[9:])[1]
    others = torch.ones(4, 4).bfloat16().npu()
    assert "labelSmoothing" in phase_one(name, *_of_three_rows(smoothing=1.0, x=others))[1]


def test_statistics_of_nothing():
    vectors = _max_sum(torch.empty(0, 4).half(), torch.ones(5, 4).half(), torch.empty(0, dtype=torch.int32), 0, 2)
    assert not any(each.numel() for each in vectors)
    logits = torch.full((3, 5), 7.0).half().npu()
    given = torch.empty(3, 0).half(), torch.empty(5, 0).half(), torch.ones(3, dtype=torch.int32), 0, 2, logits
    assert [each.tolist() for each in _max_sum(*given)[:3]] == [[0] * 3, [5] * 3, [0] * 3]
    assert not logits.any()
