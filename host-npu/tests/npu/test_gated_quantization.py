"""Gated units, GELU and RmsNorm followed by a quantization on the host NPU, against float64."""

import pytest
import torch
import torch_npu
from tests._values import assert_quantized, assert_rows_quantized, called
from torch.nn.functional import gelu, rms_norm, silu

_EPSILON = 1e-6
_ONES = torch.ones(1, 16, device="npu")


def _swiglu(x, left):
    first, second = x.chunk(2, -1)
    return silu(first) * second if left else first * silu(second)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gelu_mul_is_gelu_of_the_left_half_times_the_right(dtype, approximate):
    x = torch.randn(3, 4, 16).to(dtype)
    left, right = x.double().chunk(2, -1)
    expected = gelu(left, approximate=approximate) * right
    limit = {torch.float32: 2**-22, torch.bfloat16: 2**-8}[dtype] * expected.abs().max()
    assert (torch_npu.npu_gelu_mul(x.npu(), approximate=approximate).cpu().double() - expected).abs().max() <= limit


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("smooth", [False, True])
def test_swiglu_is_quantized_row_by_row_and_has_reciprocal_scales(smooth, left):
    x, scales = torch.randn(4, 32).half(), torch.rand(1, 16)
    quantized, scale = torch_npu.npu_swiglu_quant(
        x.npu(), smooth_scales=scales.npu() if smooth else None, quant_mode=1, activate_left=left
    )
    assert_rows_quantized(quantized, scale.reciprocal(), _swiglu(x.double(), left) * (scales.double() if smooth else 1))


def test_a_dynamic_quantization_ignores_the_offsets_of_a_static_one():
    x, scales = torch.randn(4, 32).half().npu(), torch.rand(1, 16).npu()
    plain = torch_npu.npu_swiglu_quant(x, smooth_scales=scales, quant_mode=1)
    results = torch_npu.npu_swiglu_quant(x, smooth_scales=scales, offsets=torch.ones(1, 16).npu(), quant_mode=1)
    assert all(result.equal(expected) for result, expected in zip(results, plain, strict=True))


@pytest.mark.parametrize("kind", [0, 1], ids=["ends", "sizes"])
def test_groups_of_rows_have_smooth_scales_of_their_own(kind):
    x, scales = torch.randn(6, 32).half(), torch.rand(3, 16)
    groups = torch.tensor([2, 2, 6] if kind == 0 else [2, 0, 4]).npu()
    quantized, scale = torch_npu.npu_swiglu_quant(
        x.npu(), smooth_scales=scales.npu(), group_index=groups, quant_mode=1, group_list_type=kind
    )
    of_rows = scales.double().repeat_interleave(torch.tensor([2, 0, 4]), 0)
    assert_rows_quantized(quantized, scale.reciprocal(), _swiglu(x.double(), False) * of_rows)


@pytest.mark.parametrize("by_column", [False, True], ids=["tensors", "channels"])
@pytest.mark.parametrize("sizes", [None, (2, 0, 4)], ids=["one", "groups"])
def test_swiglu_is_quantized_by_given_scales_and_offsets(sizes, by_column):
    x, groups = torch.randn(6, 32).half(), 1 if sizes is None else len(sizes)
    shape = (groups, 16) if by_column else (groups,)
    scales, offsets = torch.rand(shape) * 90, torch.randn(shape) * 5
    rows = None if sizes is None else torch.tensor(sizes).int()
    options = {"smooth_scales": scales, "offsets": offsets, "group_index": rows, "group_list_type": 1}
    quantized, _ = called(torch_npu.npu_swiglu_quant, x, **options)
    lengths = torch.tensor(sizes or [6])
    factor, summand = (each.double().view(groups, -1).repeat_interleave(lengths, 0) for each in (scales, offsets))
    assert_quantized(quantized, _swiglu(x.double(), False) * factor + summand)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "static with smooth_scales and offsets only"),
        ({"smooth_scales": (1, 16), "offsets": (1,)}, "should have the same shape"),
        ({"smooth_scales": (1, 15), "offsets": (1, 15)}, r"smooth_scales has shape \[1, 15\] instead of"),
        ({"smooth_scales": (2, 16), "offsets": (2, 16)}, "one row per group"),
    ],
    ids=["no scales", "other offsets", "other columns", "no groups"],
)
def test_a_static_quantization_needs_scales_and_offsets_that_fit(options, sentence):
    x, given = torch.randn(4, 32).half().npu(), {name: torch.ones(shape).npu() for name, shape in options.items()}
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_swiglu_quant(x, **given)


@pytest.mark.parametrize("grouped", [False, True], ids=["", "groups"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_sums_are_dequantized_before_swiglu(left, grouped):
    x = torch.randint(-1000, 1000, (6, 32), dtype=torch.int32)
    sizes = torch.tensor([2, 0, 4] if grouped else [6])
    of_columns, smooth = torch.rand(len(sizes), 32) / 1000, torch.rand(len(sizes), 16)
    of_rows = torch.rand(6, 1)
    options = {"weight_scale": of_columns, "activation_scale": of_rows, "quant_scale": smooth}
    options |= {"group_index": sizes if grouped else None, "activate_left": left}
    quantized, scale = called(torch_npu.npu_dequant_swiglu_quant, x, quant_mode=1, **options)
    exact = x.double() * of_columns.double().repeat_interleave(sizes, 0) * of_rows.double()
    assert_rows_quantized(quantized, scale, _swiglu(exact, left) * smooth.double().repeat_interleave(sizes, 0))


def test_floats_need_no_dequantization_before_swiglu():
    x = torch.randn(4, 32).bfloat16()
    quantized, scale = torch_npu.npu_dequant_swiglu_quant(x.npu(), quant_mode=1)
    assert_rows_quantized(quantized, scale, _swiglu(x.double(), False))


def test_the_clipped_unit_is_quantized_as_well():
    x = torch.randn(4, 32).bfloat16() * 4
    quantized, scale = torch_npu.npu_dequant_swiglu_quant(x.npu(), quant_mode=1, swiglu_mode=1, clamp_limit=3.0)
    gate, value = x.double()[:, ::2].clamp(max=3), x.double()[:, 1::2].clamp(-3, 3)
    assert_rows_quantized(quantized, scale, gate * torch.sigmoid(gate * 1.702) * (value + 1))


@pytest.mark.parametrize("offset", [None, _ONES[0].half()], ids=["", "ignores an offset"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_quantized_row_by_row(approximate, offset):
    x, smooth = torch.randn(3, 4, 16).half(), torch.rand(16).half()
    quantized, scale = torch_npu.npu_gelu_quant(
        x.npu(), input_scale=smooth.npu(), input_offset=offset, approximate=approximate
    )
    assert_rows_quantized(quantized, scale, gelu(x.double(), approximate=approximate) * smooth.double())


def test_gelu_is_quantized_by_a_given_scale():
    x, factor, offset = torch.randn(4, 16).half(), torch.tensor([20.0]).half(), torch.tensor([3.0]).half()
    quantized, _ = torch_npu.npu_gelu_quant(
        x.npu(), input_scale=factor.npu(), input_offset=offset.npu(), quant_mode="static"
    )
    assert_quantized(quantized, gelu(x.double()) * 20 + 3)


def _normal(x, gamma):
    return rms_norm(x.double(), (16,), gamma.double(), _EPSILON)


@pytest.mark.parametrize("divides", [True, False], ids=["divides", "multiplies"])
def test_rms_norm_is_quantized_by_a_scale_of_columns(divides):
    x, gamma, beta = (torch.randn(shape).half() for shape in ((4, 16), (16,), (16,)))
    scale = torch.rand(16) + (0.05 if divides else 10)
    quantized, _ = torch_npu.npu_rms_norm_quant_v2(
        x.npu(), gamma.npu(), scale.npu(), beta=beta.npu(), epsilon=_EPSILON, div_mode=divides
    )
    normal = _normal(x, gamma) + beta.double()
    assert_quantized(quantized, normal / scale.double() if divides else normal * scale.double(), limit=2e-3)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 needs an output_mask of its own kind")
@pytest.mark.parametrize("smooth", [0, 1, 2], ids=["no scale", "one scale", "two scales"])
def test_rms_norm_of_a_sum_is_quantized_for_each_smooth_scale(smooth):
    x1, x2, gamma = (torch.randn(shape).half() for shape in ((4, 16), (4, 16), (16,)))
    scales = [torch.rand(16).half() for _ in range(smooth)]
    options = dict(zip(("smooth_scale1", "smooth_scale2"), scales, strict=False))
    results = called(torch_npu.npu_add_rms_norm_dynamic_quant, x1, x2, gamma, epsilon=_EPSILON, **options)
    normal = _normal(x1.float() + x2.float(), gamma)
    torch.testing.assert_close(results[2].cpu(), x1 + x2)
    for index, scale in enumerate(scales or [torch.ones(16)]):
        assert_rows_quantized(results[index], results[3 + index], normal * scale.double())


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 needs an output_mask of its own kind")
def test_a_mask_says_which_quantizations_are_wanted():
    x, gamma = torch.randn(4, 16).half(), torch.randn(16).half()
    y1, y2, _, scale1, scale2 = torch_npu.npu_add_rms_norm_dynamic_quant(
        x.npu(), x.npu(), gamma.npu(), epsilon=_EPSILON, output_mask=[False, True]
    )
    assert_rows_quantized(y2, scale2, _normal(x.float() * 2, gamma))
    assert y1.numel() <= 1 or scale1.isnan().all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: torch_npu.npu_dequant_swiglu_quant(x, quant_mode=0, quant_scale=_ONES), "dynamically"),
        (
            lambda x: torch_npu.npu_dequant_swiglu_quant(x.int(), quant_mode=1),
            "weight_scale must be given for x of int32",
        ),
        (
            lambda x: torch_npu.npu_dequant_swiglu_quant(x, activation_scale=x[:, :1].float(), quant_mode=1),
            "activation_scale and bias are for x of int32 only",
        ),
        (
            lambda x: torch_npu.npu_dequant_swiglu_quant(x, bias=x[0], quant_mode=1),
            "activation_scale and bias are for x of int32 only",
        ),
        (
            lambda x: torch_npu.npu_dequant_swiglu_quant(
                x, quant_scale=x[0, :16].float(), group_index=torch.ones(16).long().npu(), quant_mode=1
            ),
            r"quantScale has shape \[16\] instead of \[\*, 16\]",
        ),
    ],
    ids=["static", "no weight_scale", "activation_scale", "bias", "a number for each group"],
)
def test_what_is_not_computed_is_refused_at_the_call(call, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        call(torch.randn(4, 32).half().npu())
