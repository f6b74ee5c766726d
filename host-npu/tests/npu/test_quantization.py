"""Quantization on the host NPU, against its formula in float64."""

import host_npu
import pytest
import torch
import torch_npu
from tests._values import assert_quantized, assert_rows_quantized
from torch.nn.functional import rms_norm

_MODES = pytest.mark.parametrize("mode", ["pertoken", "pertensor"])


def _rows(x, mode):
    return x.double().flatten()[None] if mode == "pertensor" else x.double().flatten(0, -2)


@_MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_dynamic_scale_makes_the_largest_127(mode, dtype):
    x = torch.randn(3, 5, 16).to(dtype)
    quantized, scale = torch_npu.npu_dynamic_quant(x.npu(), quant_mode=mode)
    rows = _rows(x, mode)
    assert_rows_quantized(quantized.view(rows.shape), scale, rows)


def test_smooth_scales_come_before_the_dynamic_scale():
    x, smooth = torch.randn(4, 16).half(), torch.rand(16).half()
    quantized, scale = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=smooth.npu())
    assert_rows_quantized(quantized, scale, x.double() * smooth.double())


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
def test_groups_of_rows_have_smooth_scales_of_their_own(shape):
    x, smooth = torch.randn(shape).half(), torch.rand(3, 16).half()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    smoothed = (x.view(6, 16).double() * smooth.double()[[0, 0, 2, 2, 2, 2]]).view(shape)
    quantized, scale = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=smooth.npu(), group_index=ends.npu())
    assert_rows_quantized(quantized, scale, smoothed)
    quantized, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(
        x.npu(), smooth_scales=smooth.npu(), group_index=ends.npu()
    )
    expected = (smoothed.amax(-1) - smoothed.amin(-1)) / 255
    torch.testing.assert_close(scale.cpu().double(), expected, rtol=1e-6, atol=0)
    assert_quantized(quantized, smoothed / expected[..., None] + offset.cpu().double()[..., None])


def test_rows_of_zeros_are_quantized_to_zeros():
    quantized, scale = torch_npu.npu_dynamic_quant(torch.zeros(2, 8).half().npu())
    assert not quantized.any() and not scale.any()


@_MODES
def test_an_asymmetric_scale_has_an_offset(mode):
    x = torch.randn(3, 5, 16).half() + 1
    quantized, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(x.npu(), quant_mode=mode)
    rows = _rows(x, mode)
    expected = (rows.amax(-1, True) - rows.amin(-1, True)) / 255
    shift = 127 - rows.amax(-1, True) / expected
    torch.testing.assert_close(scale.cpu().double().view(-1, 1), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(offset.cpu().double().view(-1, 1), shift, rtol=1e-5, atol=1e-4)
    assert_quantized(quantized, (rows / expected + shift).view(x.shape))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
def test_quantize_multiplies_with_the_scale_of_an_axis(axis, offset):
    x = torch.randn(2, 4, 6) * 100
    scale = torch.rand(x.size(axis)) + 0.5
    zero = torch.randn(x.size(axis)) * 10 if offset else None
    result = torch_npu.npu_quantize(
        x.npu(), scale.npu(), None if zero is None else zero.npu(), torch.qint8, axis, div_mode=False
    )
    shape = (-1,) if axis == -1 else (-1, 1)
    exact = x.double() * scale.double().view(shape)
    assert_quantized(result, exact if zero is None else exact + zero.double().view(shape))


@pytest.mark.parametrize(("dtype", "limits"), [(torch.qint8, (-128, 127)), (torch.quint8, (0, 255))], ids=str)
def test_quantize_divides_by_the_scale(dtype, limits):
    x, scale, zero = torch.randn(5, 4) * 100, torch.rand(4) + 0.5, torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    result = torch_npu.npu_quantize(x.npu(), scale.npu(), zero.npu(), dtype, 1)
    exact = (x.double() / scale.double() + zero).clamp(*limits)
    assert (result.cpu().double() - exact).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_anti_quant_adds_the_offset_before_it_scales(dtype):
    x = torch.randint(-128, 128, (5, 8), dtype=torch.int8)
    scale, offset = torch.rand(8), torch.randn(8)
    result = torch_npu.npu_anti_quant(x.npu(), scale.npu(), offset=offset.npu(), dst_dtype=dtype)
    expected = (x.double() + offset.double()) * scale.double()
    torch.testing.assert_close(result.cpu().double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda x: torch_npu.npu_dynamic_quant(x, group_index=torch.tensor([4], dtype=torch.int32).npu()),
            "group_index needs smooth_scales",
        ),
        (
            lambda x: torch_npu.npu_dynamic_quant(
                x, smooth_scales=torch.ones(2, 16).half().npu(), group_index=torch.tensor([4], dtype=torch.int32).npu()
            ),
            r"group_index has shape \[1\] instead of \[E\], where E is 2",
        ),
        (
            lambda x: torch_npu.npu_dynamic_quant(x, smooth_scales=torch.ones(x.shape).half().npu()),
            r"smooth_scales has shape \[.*\] instead of \[16\]",
        ),
        (lambda x: torch_npu.npu_dynamic_quant(x, quant_mode="perchannel"), "pertoken and pertensor only"),
        (
            lambda x: torch_npu.npu_dynamic_quant(x, dst_type=torch.quint4x2),
            "the host NPU does not quantize to int4, eight in each int32",
        ),
    ],
    ids=["groups without scales", "groups of another number", "scales of rows", "channels", "int4"],
)
def test_what_is_not_simulated_is_refused(call, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        call(torch.ones(4, 16).half().npu())


@pytest.mark.parametrize("offset", [None, 3.0])
def test_a_group_of_rows_has_a_row_of_the_scale(offset):
    x, scale = torch.randn(7, 8) * 50, torch.rand(3, 8) + 0.5
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    added = None if offset is None else torch.tensor([offset]).npu()
    result = torch_npu.npu_group_quant(x.npu(), scale.npu(), ends.npu(), offset=added, dst_dtype=torch.qint8)
    exact = x.double() * scale.double()[[0, 0, 2, 2, 2, 2, 2]]
    assert_quantized(result, exact + (offset or 0))


def test_rms_norm_quant_adds_beta_before_it_divides_by_the_scale():
    x, gamma, beta = torch.randn(5, 16).half(), torch.randn(16).half(), torch.randn(16).half()
    scale, offset = torch.tensor([0.0625]).half(), torch.tensor([3], dtype=torch.int8)
    result = torch_npu.npu_rms_norm_quant(*[each.npu() for each in (x, gamma, beta, scale, offset)])
    assert_quantized(result, (rms_norm(x.double(), (16,), gamma.double(), 1e-6) + beta.double()) * 16 + 3)


@pytest.mark.parametrize("divides", [False, True])
def test_add_rms_norm_quant_returns_the_sum_too(divides):
    x1, x2, gamma = torch.randn(5, 16).half(), torch.randn(5, 16).half(), torch.randn(16).half()
    scale, zero = torch.rand(16) + 0.5, torch.randint(-5, 5, (16,), dtype=torch.int32)
    results = torch_npu.npu_add_rms_norm_quant(*[each.npu() for each in (x1, x2, gamma, scale, zero)], div_mode=divides)
    total = x1.double() + x2.double()
    normal = rms_norm(total, (16,), gamma.double(), 1e-6)
    assert_quantized(results[0], (normal / scale if divides else normal * scale) + zero)
    torch.testing.assert_close(results[2].cpu().double(), total, rtol=2**-11, atol=0)


def test_add_rms_norm_quant_normalizes_all_dimensions_of_gamma():
    x1, x2, gamma = torch.randn(5, 4, 16).half(), torch.randn(5, 4, 16).half(), torch.randn(4, 16).half()
    scale, zero = torch.rand(4, 16) + 0.5, torch.randint(-5, 5, (4, 16), dtype=torch.int32)
    result = torch_npu.npu_add_rms_norm_quant(*[each.npu() for each in (x1, x2, gamma, scale, zero)])[0]
    normal = rms_norm(x1.double() + x2.double(), (4, 16), gamma.double(), 1e-6)
    assert_quantized(result, normal / scale + zero)


def test_add_rms_norm_quant_refuses_a_gamma_that_is_not_of_the_last_dimensions():
    x, gamma, scale, zero = torch.ones(5, 4, 16).half(), torch.ones(5, 16).half(), torch.ones(16), torch.zeros(16).int()
    with pytest.raises(RuntimeError, match="gamma has shape .* which is not the end of x's"):
        torch_npu.npu_add_rms_norm_quant(*[each.npu() for each in (x, x, gamma, scale, zero)])


def _integers(x):
    # torch_npu 2.9 returns the integers themselves.
    return x.int_repr() if x.is_quantized else x


@pytest.mark.parametrize("kind", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_torchs_quantization_is_torch_npus(kind):
    x, scales, zeros = torch.randn(3, 4), torch.rand(4) / 8 + 0.1, torch.arange(4, dtype=torch.int32)
    host_npu.reset()
    per_tensor = _integers(torch.quantize_per_tensor(x.npu(), 0.125, 3, kind))
    per_channel = _integers(torch.quantize_per_channel(x.npu(), scales.npu(), zeros.npu(), 1, kind))
    assert per_tensor.cpu().equal(torch.quantize_per_tensor(x, 0.125, 3, kind).int_repr())
    assert per_channel.cpu().equal(torch.quantize_per_channel(x, scales, zeros, 1, kind).int_repr())
    assert host_npu.stats().launches["aclnnQuantize"] == 2


@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_torch_quantizes_a_tensor_of_any_rank(shape):
    x = torch.randn(shape)
    quantized = _integers(torch.quantize_per_tensor(x.npu(), 0.125, 3, torch.qint8))
    assert quantized.cpu().equal(torch.quantize_per_tensor(x, 0.125, 3, torch.qint8).int_repr())


@pytest.mark.parametrize("shape", [(3, 128), (3, 200), (2, 3, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_block_of_a_row_has_a_scale(shape, dtype):
    x = torch.randn(shape).to(dtype)
    x[..., :128] *= 9
    quantized, scale = torch_npu.npu_dynamic_block_quant(x.npu())
    blocks = [block.double() for block in x.split(128, -1)]
    scales = [block.abs().amax(-1, True) / 127 for block in blocks]
    torch.testing.assert_close(scale.cpu().double(), torch.cat(scales, -1), rtol=1e-6, atol=0)
    assert_quantized(quantized, torch.cat([x / each for x, each in zip(blocks, scales, strict=True)], -1))


def test_a_block_of_zeros_has_the_scale_0():
    quantized, scale = torch_npu.npu_dynamic_block_quant(torch.zeros(2, 128).half().npu())
    assert not quantized.any() and not scale.any()


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"min_scale": 0.1}, "minScale 0 only"),
        ({"row_block_size": 128}, "blocks of 1 row and 128 columns only, not 128"),
        ({"round_mode": "round"}, "roundMode is round instead of rint"),
    ],
    ids=str,
)
def test_other_blocks_are_refused(option, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_dynamic_block_quant(torch.ones(256, 128).half().npu(), **option)
