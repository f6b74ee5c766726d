"""Matrix products combined with other operations on the host NPU, against float64."""

import pytest
import torch
import torch_npu
from tests._values import assert_gradients, assert_near, called, leaves

_FUNCTIONS = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("activation", _FUNCTIONS)
def test_two_layers_have_an_activation_between(activation):
    x, w1, w2, b1, b2 = (torch.randn(shape).half() for shape in ((5, 8), (8, 16), (16, 8), (16,), (8,)))
    on_npu = [each.npu() for each in (x, w1, w2)]
    result = torch_npu.npu_ffn(*on_npu, activation, bias1=b1.npu(), bias2=b2.npu())
    hidden = _FUNCTIONS[activation](x.double() @ w1.double() + b1.double())
    assert_near(result, hidden @ w2.double() + b2.double(), units=2)


def test_gelu_is_that_of_ascend_c_also_where_it_is_small():
    # CANN's ffn_base.h calls Gelu, which is documented with tanh; the erf formula differs by up to 5e-4.
    x, matrix = torch.linspace(-3, -1, 8).half().unsqueeze(0), torch.eye(8).half().npu()
    assert_near(torch_npu.npu_ffn(x.npu(), matrix, matrix, "gelu"), _FUNCTIONS["gelu"](x.double()), units=1)


@pytest.mark.parametrize("ends", [False, True], ids=["sizes", "ends"])
def test_each_expert_has_layers_of_its_own(ends):
    x, w1, w2, b1 = (torch.randn(shape).half() for shape in ((9, 8), (3, 8, 16), (3, 16, 8), (3, 16)))
    tokens = {"expert_tokens_index": [2, 2, 9]} if ends else {"expert_tokens": [2, 0, 7]}
    result = torch_npu.npu_ffn(x.npu(), w1.npu(), w2.npu(), "relu", bias1=b1.npu(), **tokens)
    parts = zip(x.double().split([2, 0, 7]), w1.double(), w2.double(), b1.double(), strict=True)
    expected = torch.cat([torch.relu(rows @ first + bias) @ second for rows, first, second, bias in parts])
    assert_near(result, expected, units=2)


def _whole(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


_LAYERS = ((8, 16), (16, 8))


@pytest.mark.parametrize(
    ("experts", "is_of_columns", "dtype", "of_scale"),
    [
        ((), False, torch.half, torch.float32),
        ((), True, torch.half, torch.int64),
        ((3,), False, torch.bfloat16, torch.bfloat16),
        ((3,), True, torch.half, torch.int64),
    ],
    ids=str,
)
def test_two_layers_of_int8_quantize_between_them(experts, is_of_columns, dtype, of_scale):
    x, weights = _whole(9, 8), [_whole(*experts, *shape) for shape in _LAYERS]
    biases = [torch.randint(-999, 999, (*experts, shape[1]), dtype=torch.int32) for shape in _LAYERS]
    deq_scales = [(torch.rand(*experts, shape[1]) / 999).bfloat16() for shape in _LAYERS]
    scale = torch.rand(*experts, 16) * 9 if is_of_columns else torch.rand(experts or (1,)) * 9
    offset = torch.randint(-9, 9, experts or (1,)).float()
    bits = [
        each.float().view(torch.int32).long() if of_scale is torch.int64 else each.to(of_scale) for each in deq_scales
    ]
    tokens = [2, 0, 7]
    result = torch_npu.npu_ffn(
        x.npu(), *(each.npu() for each in weights), "relu", expert_tokens=tokens if experts else None,
        bias1=biases[0].npu(), bias2=biases[1].npu(), scale=scale.npu(), offset=offset.npu(),
        deq_scale1=bits[0].npu(), deq_scale2=bits[1].npu(), output_dtype=dtype,
    )  # fmt: skip

    def layer(rows, index, expert):
        found = [each[index].double()[expert] for each in (weights, biases, deq_scales)]
        return (rows.double() @ found[0] + found[1]) * found[2]

    expected = []
    for number, rows in enumerate(x.split(tokens) if experts else [x]):
        expert = number if experts else ...
        hidden = torch.relu(layer(rows, 0, expert)).float() * scale[expert] + offset[expert]
        expected.append(layer(hidden.round().clamp(-128, 127), 1, expert))
    assert result.dtype == dtype
    assert_near(result, torch.cat(expected), units=2)


@pytest.mark.parametrize("groups", [(), (2,)], ids=["columns", "groups"])
@pytest.mark.parametrize("experts", [(), (2,)], ids=["", "experts"])
def test_two_layers_may_have_weights_of_int8(experts, groups):
    x, weights = torch.randn(9, 8).half(), [_whole(*experts, *shape) for shape in _LAYERS]
    scales, offsets = ([torch.rand(*experts, *groups, n).half() / by for n in (16, 8)] for by in (9, 0.1))
    result = torch_npu.npu_ffn(
        x.npu(), *(each.npu() for each in weights), "silu", expert_tokens_index=[4, 9] if experts else None,
        antiquant_scale1=scales[0].npu(), antiquant_scale2=scales[1].npu(),
        antiquant_offset1=offsets[0].npu(), antiquant_offset2=offsets[1].npu(),
    )  # fmt: skip

    def whole(index, expert):
        rows = _LAYERS[index][0] // (groups or (1,))[0]
        of_rows = [
            each[index][expert].double().reshape(-1, _LAYERS[index][1]).repeat_interleave(rows, 0)
            for each in (scales, offsets)
        ]
        return (weights[index][expert] + of_rows[1]) * of_rows[0]

    expected = []
    for number, rows in enumerate(x.double().split([4, 5]) if experts else [x.double()]):
        expert = number if experts else ...
        expected.append(torch.nn.functional.silu(rows @ whole(0, expert)) @ whole(1, expert))
    assert_near(result, torch.cat(expected), units=2)


_INT8_LAYERS = {
    "scale": torch.ones(1),
    "offset": torch.zeros(1),
    "deq_scale1": torch.ones(16),
    "deq_scale2": torch.ones(8),
}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"scale": None}, "x has dtype int8, with which CANN takes scale, deqScale1 and deqScale2"),
        (
            {"scale": torch.ones(16)},
            r"scale has shape \[16\], of columns, with which CANN takes no deqScale of float32",
        ),
        ({"deq_scale2": torch.ones(16)}, r"deqScale2 has shape \[16\] instead of \[K1\], where K1 is 8"),
        ({"deq_scale2": torch.ones(8).long()}, "these dtypes cannot be combined: x int8, .*deqScale2 int64"),
        ({"bias1": torch.ones(16)}, "these dtypes cannot be combined: x int8, .*bias1 float32"),
        ({"x": torch.ones(5, 8).half()}, "these dtypes cannot be combined: x float16, weight1 int8"),
    ],
    ids=["no scale", "columns", "shape", "int64", "bias", "x"],
)
def test_layers_of_int8_that_do_not_fit_are_refused_at_the_call(changed, sentence):
    options = _INT8_LAYERS | changed
    x = options.pop("x", _whole(5, 8))
    on_npu = {name: each if each is None else each.npu() for name, each in options.items()}
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_ffn(x.npu(), *(_whole(*shape).npu() for shape in _LAYERS), "relu", **on_npu)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_batched_product_is_permuted_before_and_after(parts):
    x, weight = torch.randn(5, 3, 64).half(), torch.randn(3, 64, 128).half()
    result = torch_npu.npu_transpose_batchmatmul(
        x.npu(), weight.npu(), perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2], batch_split_factor=parts
    )
    exact = torch.einsum("mbk,bkn->mbn", x.double(), weight.double())
    assert_near(result, exact if parts == 1 else exact.transpose(0, 1).contiguous(), units=2)


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("precise", [0, 1])
def test_weights_of_int8_are_dequantized(precise, group_size):
    x, weight = torch.randn(4, 64).half(), torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    shape = (32,) if group_size == 0 else (2, 32)
    scale, offset, bias = torch.rand(shape).half(), torch.randint(-9, 9, shape).half(), torch.randn(32).half()
    options = {"bias": bias, "antiquant_group_size": group_size, "inner_precise": precise}
    result = called(torch_npu.npu_weight_quant_batchmatmul, x, weight, scale, offset, **options)
    whole = [each.double() if group_size == 0 else each.double().repeat_interleave(32, 0) for each in (scale, offset)]
    assert_near(result, x.double() @ ((weight.double() + whole[1]) * whole[0]) + bias.double(), units=2)


@pytest.mark.parametrize("in_bits", [False, True])
def test_a_product_with_int8_weights_may_be_quantized(in_bits):
    x, weight = torch.randn(4, 64).half(), torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    scale, quant_scale = torch.rand(1, 32).half(), torch.rand(1, 32) / 9
    offset = torch.arange(-16.0, 16) if in_bits else torch.zeros(32)
    bits = torch_npu.npu_trans_quant_param(quant_scale.npu(), offset[None].npu())
    on_npu = [each.npu() for each in (x, weight, scale)]
    result = torch_npu.npu_weight_quant_batchmatmul(*on_npu, quant_scale=bits if in_bits else quant_scale.npu())
    assert result.dtype == torch.int8
    exact = x.double() @ (weight.double() * scale.double()) * quant_scale + offset
    # The scale has 10 mantissa bits.
    assert (result.cpu() - exact.clamp(-128, 127)).abs().max() < 0.501 + 128 * 2**-10


_GATES = {
    "geglu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "swiglu": torch.nn.functional.silu,
    "reglu": torch.relu,
}


@pytest.mark.parametrize("gate", _GATES)
def test_a_gate_activates_the_second_half(gate):
    x, w1, w2, b1 = (torch.randn(shape).half() for shape in ((5, 8), (8, 16), (8, 8), (16,)))
    result = torch_npu.npu_ffn(x.npu(), w1.npu(), w2.npu(), gate, bias1=b1.npu(), inner_precise=1)
    up, gated = (x.double() @ w1.double() + b1.double()).chunk(2, -1)
    assert_near(result, (up * _GATES[gate](gated)) @ w2.double(), units=2)


@pytest.mark.parametrize(
    ("dtype", "options", "sentence"),
    [
        (torch.half, {}, "no experts, dtype float16 and innerPrecise 0"),
        (torch.bfloat16, {"inner_precise": 1}, "no experts, dtype bfloat16 and innerPrecise 1"),
        (torch.half, {"inner_precise": 1, "expert_tokens": [5]}, "with experts, dtype float16 and innerPrecise 1"),
    ],
    ids=["precise", "bfloat16", "experts"],
)
def test_gates_that_cann_does_not_have_are_refused_at_the_call(dtype, options, sentence):
    experts = (1,) if "expert_tokens" in options else ()
    tensors = (torch.randn(shape).to(dtype).npu() for shape in ((5, 8), (*experts, 8, 16), (*experts, 8, 8)))
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_ffn(*tensors, "geglu", **options)


def test_other_activations_are_refused_at_the_call():
    with pytest.raises(RuntimeError, match="activation"):
        torch_npu.npu_ffn(*(torch.randn(shape).half().npu() for shape in ((5, 8), (8, 16), (16, 8))), "mish")


@pytest.mark.parametrize("smooth", [False, True])
def test_rows_are_quantized_for_a_product_with_int8(smooth):
    x, weight = torch.randn(4, 64).half(), torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    scale, factors = torch.rand(32), torch.rand(64).half() + 0.5
    result = torch_npu.npu_quant_matmul_dequant(
        x.npu(), weight.npu(), scale.npu(), smooth_scale=factors.npu() if smooth else None
    )
    rows = x.double() * (factors.double() if smooth else 1)
    of_rows = rows.abs().amax(-1, True) / 127
    exact = (rows / of_rows).round() * of_rows @ weight.double().t() * scale.double()
    torch.testing.assert_close(result.cpu().double(), exact, rtol=0, atol=2e-3 * exact.abs().max().item())


def test_groups_of_rows_are_quantized_for_products_with_int8():
    x, weight = torch.randn(9, 64).half(), torch.randint(-128, 128, (3, 32, 64), dtype=torch.int8)
    scale, ends = torch.rand(3, 32), torch.tensor([2, 2, 9])
    result = torch_npu.npu_quant_grouped_matmul_dequant(x.npu(), weight.npu(), scale.npu(), ends.npu())
    of_rows = x.double().abs().amax(-1, True) / 127
    rows = ((x.double() / of_rows).round() * of_rows).split([2, 0, 7])
    parts = zip(rows, weight.double(), scale.double(), strict=True)
    exact = torch.cat([each @ matrix.t() * of_columns for each, matrix, of_columns in parts])
    torch.testing.assert_close(result.cpu().double(), exact, rtol=0, atol=2e-3 * exact.abs().max().item())


@pytest.mark.parametrize("biased", [False, True])
def test_torch_npus_linear_is_linear(biased):
    inputs = [torch.randn(shape).half() for shape in ((5, 8), (4, 8), (4,))][: 3 if biased else 2]
    on_npu, wide = leaves(*inputs)
    result, expected = torch_npu.npu_linear(*on_npu), torch.nn.functional.linear(*wide)
    assert_near(result, expected, units=2)
    assert_gradients(result, expected, on_npu, wide, units=2)
