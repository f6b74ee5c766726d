"""Results on an NPU for infinite, nan and very large numbers, and the accuracy of CANN's fused operators."""

import math

from torch_aclnn_ops.functional import linear_cross_entropy
from torch_aclnn_ops.ops._chunks import IGNORED
from torch_aclnn_ops.ops.linear_cross_entropy import fused
from torch_aclnn_ops.ops.linear_cross_entropy.call import ELSEWHERE, Call, combine

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from tests import test_ema_adam as ema_adam
from tests import test_linear_cross_entropy_nonfinite as cases
from tests.npu._operators import counted_launches, run_adam


@pytest.mark.parametrize("ways", [{}, {"chunk_size": 2}], ids=str)
@cases.each_option
@pytest.mark.parametrize("name", [name for name in cases.CHANGES if name not in cases.SPREADING])
def test_loss_and_gradients_are_nan_where_torchs_are(name, options, ways):
    cases.assert_nan_where_torchs_are(cases.CHANGES[name], options, "npu", **ways)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("name", cases.CHANGES)
def test_gradients_of_the_fused_operators_are_nan_where_torchs_are(name, options):
    tensors, options = cases.tensors_and_options(cases.CHANGES[name], options, torch.bfloat16)
    results, expected = (
        cases.loss_and_gradients(function, tensors, options, *where)
        for function, *where in ((cases.ours.linear_cross_entropy, "npu", torch.bfloat16), (cases.torchs,))
    )
    for result, other in zip(results, expected, strict=True):
        assert result[other.isnan()].isnan().all()
        assert not result[~other.isfinite()].isfinite().any()


@pytest.mark.parametrize("scale", [1e38, -1e38])
def test_label_smoothing_survives_logits_near_the_largest_number(scale):
    cases.assert_smoothing_survives_large_logits(scale, {}, "npu")


@pytest.mark.parametrize("options", cases.LARGE_SOFTCAPS, ids=str)
def test_a_softcap_above_the_largest_number_is_a_no_op(options):
    cases.assert_a_large_softcap_leaves_the_logits(options, "mean", "npu")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["grad", *ema_adam.STATE])
def test_a_step_makes_the_same_values_nonfinite_as_on_the_cpu(name, value):
    tensors = ema_adam.make_tensors(torch.float32)
    tensors[name][0] = value
    on_npu = run_adam(tensors)
    for state, expected in ema_adam.run(tensors).items():
        torch.testing.assert_close(on_npu[state].cpu(), expected, equal_nan=True)


def test_an_ignored_row_does_not_overflow_with_a_weight_near_the_largest_number():
    weight = torch.full((5, 4), 2e38).npu().requires_grad_()
    input = torch.zeros(3, 4).npu().requires_grad_()
    target = torch.tensor([1, -100, 2]).npu()
    loss = cases.ours.linear_cross_entropy(input, weight, target, chunk_size=2)
    loss.backward()
    torch.testing.assert_close(loss.cpu(), torch.tensor(5.0).log())
    assert not weight.grad.any() and input.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"ignore_index": 1}], ids=str)
def test_a_class_out_of_range_makes_its_loss_nan_even_with_one_feature(dtype, options):
    input, weight = torch.ones(3, 1, dtype=dtype).npu(), torch.ones(160, 1, dtype=dtype).npu()
    target = torch.tensor([0, 160, options.get("ignore_index", -100)]).npu()
    losses = linear_cross_entropy(input, weight, target, reduction="none", **options)
    assert losses.isnan().tolist() == [False, True, False] and losses[2] == 0


ROWS, FEATURES, CLASSES = 96, 64, 512
DTYPES = (torch.float16, torch.bfloat16)


def rows_sure_of_a_class(dtype, scale=1.0):
    """Return rows, a head, and for each row the class that has nearly all of its probability."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (ROWS,), generator=generator)
    weight = torch.randn(CLASSES, FEATURES, generator=generator) * 0.3 * scale
    noise = torch.randn(ROWS, FEATURES, generator=generator) * 0.3
    return (weight[classes] / (0.3 * scale) + noise).to(dtype), weight.to(dtype), classes


def loss_and_gradients(function, tensors, target, device, dtype):
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    loss = function(*leaves, target.to(device))
    loss.backward()
    return [result.detach().cpu().double() for result in (loss, *(leaf.grad for leaf in leaves))]


def plain(input, weight, target):
    return cross_entropy(linear(input, weight), target)


def errors(results, expected):
    return [float((result - truth).norm() / truth.norm()) for result, truth in zip(results, expected, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_the_model_is_sure_of_the_target_gradients_are_as_accurate_as_torchs(dtype):
    *tensors, target = rows_sure_of_a_class(dtype)
    expected = loss_and_gradients(plain, tensors, target, "cpu", torch.float64)
    torchs = errors(loss_and_gradients(plain, tensors, target, "npu", dtype), expected)
    with counted_launches() as launches:
        ours = errors(loss_and_gradients(linear_cross_entropy, tensors, target, "npu", dtype), expected)
    assert launches["aclnnFusedLinearCrossEntropyLossGrad"] == 1
    assert 0 < expected[0] < 0.01  # the model is confident
    assert all(one <= 1.2 * other for one, other in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_it_is_sure_of_another_class_the_error_is_that_of_a_rounded_logit(dtype):
    *tensors, classes = rows_sure_of_a_class(dtype)
    target = (classes + 1) % CLASSES
    expected = loss_and_gradients(plain, tensors, target, "cpu", torch.float64)
    ours = errors(loss_and_gradients(linear_cross_entropy, tensors, target, "npu", dtype), expected)
    largest = float(linear(*(tensor.double() for tensor in tensors)).abs().max())
    assert max(ours) <= largest * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("logit", [32.125, 64.25, 128.5, 257.0])
def test_the_errors_of_a_large_logit_are_bounded_by_its_rounding(logit):
    input = torch.ones(1, 2, dtype=torch.bfloat16, device="npu", requires_grad=True)
    weight = torch.zeros(160, 2, dtype=torch.bfloat16, device="npu")
    weight[0] = torch.tensor([logit - logit % 32, logit % 32])  # both are exact, the logit lies between two numbers
    loss = linear_cross_entropy(input, weight.requires_grad_(), torch.tensor([1], device="npu"))
    loss.backward()
    rounding = logit / 256
    assert abs(loss.item() - logit) <= rounding
    errors = (input.grad.cpu() / weight[0].detach().cpu() - 1).abs()
    assert 0.9 * math.expm1(rounding) < errors.max().item() <= 1.01 * math.expm1(rounding)


def test_logits_that_are_rounded_by_more_than_float32_can_exponentiate_have_a_finite_loss():
    *tensors, target = rows_sure_of_a_class(torch.bfloat16, 4000.0)
    leaves = [tensor.npu() for tensor in tensors]
    for targets in (target, (target + 1) % CLASSES):
        losses = linear_cross_entropy(*leaves, targets.npu(), reduction="none")
        expected = cross_entropy(linear(*(tensor.double() for tensor in tensors)), targets, reduction="none")
        assert losses.isfinite().all()
        torch.testing.assert_close(losses.cpu().double(), expected, rtol=0.02, atol=1000)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"lse_square_scale": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_an_ignored_row_with_large_logits_is_zero(dtype, options):
    *tensors, target = rows_sure_of_a_class(dtype, 30.0)
    target[::2] = -100
    leaves = [tensor.npu().requires_grad_() for tensor in tensors]
    assert linear(*leaves).max() > 100  # its exp is infinite
    linear_cross_entropy(*leaves, target.npu(), **options).sum().backward()
    assert not leaves[0].grad[::2].any()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_losses_are_counted_in_float32_whatever_torch_s_default_dtype_is(default):
    generator = torch.Generator().manual_seed(0)
    input, weight = (torch.randn(rows, 8, generator=generator).bfloat16().npu() for rows in (301, 160))
    target = torch.randint(160, (301,), generator=generator).npu()
    expected = linear_cross_entropy(input, weight, target)
    torch.set_default_dtype(default)
    try:
        loss = linear_cross_entropy(input, weight, target)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.equal(expected)


def test_the_targets_logits_are_computed_in_chunks_of_rows(monkeypatch):
    input, weight, target = (tensor.npu() for tensor in rows_sure_of_a_class(torch.bfloat16))
    losses = linear_cross_entropy(input, weight, target, reduction="none")
    monkeypatch.setattr(fused, "_FEATURES_AT_A_TIME", 7 * FEATURES)
    assert linear_cross_entropy(input, weight, target, reduction="none").equal(losses)


def test_the_statistics_of_two_shards_make_those_of_all_classes():
    input, weight, target = rows_sure_of_a_class(torch.bfloat16)
    target[::7] = IGNORED
    half = CLASSES // 2
    parts = [slice(0, half), slice(half, CLASSES)]
    is_here = torch.stack([(target >= part.start) & (target < part.stop) for part in parts])
    found = []
    for part, here in zip(parts, is_here, strict=True):
        elsewhere = torch.where(target == IGNORED, IGNORED, ELSEWHERE)
        of_part = torch.where(here, target - part.start, elsewhere).npu()
        call = Call(input.npu(), weight[part].npu(), None, of_part, is_shard=True)
        found.append([rows.cpu() for rows in fused.fused_statistics(call)[:3]])
    named = fused.Statistics(*(torch.stack(rows) for rows in zip(*found, strict=True)))
    results = combine(named, is_here, parts, None).without(target == IGNORED)
    losses = results.log_sum_exp - results.predicted
    expected = cross_entropy(linear(input.double(), weight.double()), target, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(losses.double(), expected, rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("reduction", "expected"), [("sum", [0.0]), ("mean", [math.nan]), ("none", [])])
def test_no_rows_have_no_loss_and_gradients_of_zero(dtype, reduction, expected):
    input, weight = torch.ones(0, FEATURES), torch.ones(CLASSES, FEATURES)
    leaves = [tensor.to(dtype).npu().requires_grad_() for tensor in (input, weight)]
    loss = linear_cross_entropy(*leaves, torch.zeros(0, dtype=torch.int64).npu(), reduction=reduction)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach().cpu().reshape(-1), torch.tensor(expected), equal_nan=True)
    assert leaves[0].grad.shape == (0, FEATURES) and not leaves[1].grad.any()
