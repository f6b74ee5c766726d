"""Products of int8 matrices on the host NPU, against exact integers."""

import pytest
import torch
import torch_npu
from tests._aclnn import phase_one
from tests._process import error_of, on_npu
from tests._values import assert_near, assert_quantized, called

_TOKENS, _INNER, _OUTER = 5, 32, 12


def _matrices():
    return [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((_TOKENS, _INNER), (_INNER, _OUTER))]


def _product(x1, x2):
    return (x1.long() @ x2.long()).double()


def _cut(scale):
    return (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _close(actual, expected):
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=torch.finfo(actual.dtype).eps, atol=1e-6)


def test_sums_are_exact():
    x1, x2 = _matrices()
    bias = torch.randint(-1000, 1000, (_OUTER,), dtype=torch.int32)
    result = called(torch_npu.npu_quant_matmul, x1, x2, torch.ones(_OUTER), bias=bias, output_dtype=torch.int32)
    assert torch.equal(result.cpu().double(), _product(x1, x2) + bias)


@pytest.mark.usefixtures("private_formats")
def test_products_of_a_batch_are_added_up():
    x1, x2 = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((3, _TOKENS, _INNER), (3, _INNER, 64)))
    of_rows, of_columns = torch.rand(3, _TOKENS), torch.rand(64).bfloat16()
    tiled = torch_npu.npu_format_cast(x2.npu(), 29)
    result = called(torch_npu.npu_quant_matmul_reduce_sum, x1, tiled, x1_scale=of_rows, x2_scale=of_columns)
    expected = (x1.double() @ x2.double() * of_rows[..., None] * of_columns).sum(0)
    assert_near(result, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_float16_has_19_bits_of_the_scale(transposed):
    x1, x2 = _matrices()
    scale = torch.rand(_OUTER) / 100
    on_npu = x2.t().contiguous().npu().t() if transposed else x2.npu()
    result = torch_npu.npu_quant_matmul(x1.npu(), on_npu, scale.npu(), output_dtype=torch.float16)
    _close(result, _product(x1, x2) * _cut(scale).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.int32, torch.float32], ids=str)
def test_a_token_has_a_scale_too(dtype, bias):
    x1, x2 = _matrices()
    scale, tokens = torch.rand(_OUTER) / 100, torch.rand(_TOKENS)
    added = None if bias is None else (torch.randn(_OUTER) * 100).to(bias)
    result = called(torch_npu.npu_quant_matmul, x1, x2, scale, pertoken_scale=tokens, bias=added, output_dtype=dtype)
    scales = scale.double() * tokens.double()[:, None]
    expected = _product(x1, x2)
    if bias is torch.int32:
        expected += added
    expected *= scales
    _close(result, expected + added.double() if bias is torch.float32 else expected)


@pytest.mark.parametrize("bias", [None, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_dequant_bias_scales_sums(bias, per_token):
    sums, scale = torch.randint(-1000, 1000, (_TOKENS, _OUTER), dtype=torch.int32), torch.rand(_OUTER)
    tokens = torch.rand(_TOKENS) if per_token else None
    added = None if bias is None else (torch.randn(_OUTER) * 100).to(bias)
    result = called(torch_npu.npu_dequant_bias, sums, scale, tokens, added, output_dtype=torch.float16)
    expected = sums.double() + added if bias is torch.int32 else sums.double()
    expected = expected * scale.double() * (1 if tokens is None else tokens.double()[:, None])
    _close(result, expected + added.double() if bias is torch.float32 else expected)


def test_round_mode_1_rounds_a_scale_to_19_bits_and_0_cuts_it_off():
    scale = torch.tensor([0x3F801FFF, 0x3F800FFF], dtype=torch.int32).view(torch.float32).npu()
    kept = [torch_npu.npu_trans_quant_param(scale, round_mode=mode).bitwise_and(0xFFFFFFFF).tolist() for mode in (0, 1)]
    assert kept == [[0x3F800000, 0x3F800000], [0x3F802000, 0x3F800000]]


def test_an_offset_is_in_the_bits_of_a_scale():
    scale, offset = torch.tensor([1.5, 0.1]), torch.tensor([-3.0, 300.0])
    bits = torch_npu.npu_trans_quant_param(scale.npu(), offset.npu())
    assert bits.tolist() == [
        low & 0xFFFFE000 | 1 << 46 | (whole & 0x1FF) << 37
        for low, whole in zip(scale.view(torch.int32).tolist(), (-3, 255), strict=True)
    ]


@pytest.mark.parametrize(
    ("scale", "tokens", "bias", "out", "sentence"),
    [
        (torch.float32, True, torch.float16, torch.bfloat16, "x2Scale float32, bias float16, out bfloat16"),
        (torch.float32, True, torch.bfloat16, torch.float16, "x2Scale float32, bias bfloat16, out float16"),
        (torch.float32, True, None, torch.int32, "x2Scale float32, out int32"),
        (torch.bfloat16, True, None, torch.float16, "x2Scale bfloat16, out float16"),
        (torch.int64, False, None, torch.bfloat16, "x2Scale int64, out bfloat16"),
        (torch.int64, False, torch.float16, torch.float16, "x2Scale int64, bias float16, out float16"),
    ],
    ids=str,
)
def test_dtypes_that_do_not_go_together_are_refused_at_the_call(scale, tokens, bias, out, sentence):
    x1, x2 = (each.npu() for each in _matrices())
    status, message, _ = phase_one(
        "aclnnQuantMatmulV5",
        *(x1, x2, torch.ones(_TOKENS).npu() if tokens else None, torch.ones(_OUTER).to(scale).npu()),
        *(None, None, None, None, None if bias is None else torch.zeros(_OUTER).to(bias).npu(), False, False, 0),
        torch.empty(_TOKENS, _OUTER, dtype=out, device="npu"),
    )
    assert status == 161002
    assert f"these dtypes cannot be combined: {'x1Scale float32, ' * tokens}{sentence}" in message


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("offset", [None, 1, _OUTER])
def test_a_product_may_become_int8_with_an_offset(offset, biased):
    x1, x2 = _matrices()
    scale, bias = torch.rand(_OUTER) / 300, torch.randint(-1000, 1000, (_OUTER,), dtype=torch.int32)
    shift = None if offset is None else torch.randint(-9, 9, (offset,)).float()
    result = called(torch_npu.npu_quant_matmul, x1, x2, scale, offset=shift, bias=bias.npu() if biased else None)
    exact = (_product(x1, x2) + (bias if biased else 0)) * _cut(scale).double() + (0 if shift is None else shift)
    assert_quantized(result, exact)


def test_an_int8_result_is_shifted_by_the_offset_in_the_bits_of_its_scale():
    (x1, x2), scale, offset = _matrices(), torch.rand(_OUTER) / 300, torch.linspace(-70, 70, _OUTER).round()
    bits = torch_npu.npu_trans_quant_param(scale.npu(), offset.npu())
    # CANN ignores other offsets.
    for other in (None, torch.zeros(_OUTER)):
        result = called(torch_npu.npu_quant_matmul, x1, x2, bits, offset=other)
        assert result.equal(called(torch_npu.npu_quant_matmul, x1, x2, scale, offset=offset))
    exact = _product(x1, x2) * _cut(scale).double() + offset
    assert_quantized(result, exact)
    wide = [called(torch_npu.npu_quant_matmul, x1, x2, each, output_dtype=torch.half) for each in (bits, scale)]
    assert wide[0].equal(wide[1])


def test_only_an_int8_result_has_an_offset():
    x1, x2 = _matrices()
    with pytest.raises(RuntimeError, match="x2Offset is that of an int8 result, but out has dtype float16"):
        _in_bits(x1, x2, torch.float16, torch.zeros(_OUTER).npu())
    with pytest.raises(RuntimeError, match=r"x2Offset has shape \[3\] instead of \[1\] or \[12\]"):
        _in_bits(x1, x2, torch.int8, torch.zeros(3).npu())


def _in_bits(x1, x2, dtype, offset):
    out = torch.empty(_TOKENS, _OUTER, dtype=dtype, device="npu")
    scale = torch.ones(_OUTER, dtype=torch.int64).npu()
    arguments = (x1.npu(), x2.npu(), None, scale, None, None, offset, None, None, False, False, 0, out)
    status, message, _ = phase_one("aclnnQuantMatmulV5", *arguments)
    assert status == 161002
    raise RuntimeError(message)


def _groups_with_a_scale_each():
    x, weight, scale = torch.ones(4, 8, dtype=torch.int8), torch.ones(2, 8, 3, dtype=torch.int8), torch.tensor([2.0, 3])
    options = {"group_list": torch.tensor([1, 4]), "group_type": 0, "split_item": 3, "output_dtype": torch.half}
    scales = {"scale": [scale], "per_token_scale": [torch.ones(4)]}
    return called(torch_npu.npu_grouped_matmul, [x], [weight], **scales, **options)[0].tolist()


def test_a_group_may_have_one_scale_on_the_ascend950():
    assert on_npu(_groups_with_a_scale_each, HOST_NPU_SOC="Ascend950") == [[16.0] * 3] + [[24.0] * 3] * 3
    assert "scale has shape [2] instead of [2, 3], a row for each group" in error_of(_groups_with_a_scale_each)
