"""8-bit and 4-bit numbers in blocks that share a power of two, on a simulated Ascend950, against float64 formulas."""

import functools
import itertools
import math

import pytest
import torch
import torch_npu
from tests._process import error_of, on_npu

pytestmark = pytest.mark.skipif(not hasattr(torch_npu, "npu_anti_mx_quant"), reason="torch_npu 2.9 lacks the functions")

# The largest number of a dtype, and its mantissa bits.
_DTYPES = {torch.float8_e4m3fn: (448.0, 3), torch.float8_e5m2: (57344.0, 2)}
_FLOAT4 = getattr(torch_npu, "float4_e2m1fn_x2", None)  # its tensors are bytes with two numbers each
_NUMBERS = _DTYPES | {_FLOAT4: (6.0, 1)}
_LEAST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16, _FLOAT4: 0.5}
_AXES = {"last": (-1, (3, 70)), "first": (0, (70, 4)), "middle": (1, (2, 65, 4))}
_QUANTIZED = [(dtype, algorithm, axis) for dtype in _DTYPES for algorithm in (0, 1) for axis in _AXES]
_QUANTIZED += [(_FLOAT4, 0, axis) for axis in _AXES]
# Numbers of a block, and their rounded values.
_NOT_EXACT = [0.25, -0.25, 0.75, -0.75, 1.25, 1.75, 2.5, -2.5, 3.5, 5.0, -5.5, 7.5]
_ROUNDED = {
    "rint": [0.0, 0.0, 1.0, -1.0, 1.0, 2.0, 2.0, -2.0, 4.0, 4.0, -6.0, 6.0],
    "round": [0.5, -0.5, 1.0, -1.0, 1.5, 2.0, 3.0, -3.0, 4.0, 6.0, -6.0, 6.0],
    "floor": [0.0, -0.5, 0.5, -1.0, 1.0, 1.5, 2.0, -3.0, 3.0, 4.0, -6.0, 6.0],
}
# The number of a block, and for each algorithm its result and the exponent of the scale.
_SPECIAL = {
    "zeros": (0.0, (0, 0), (0, 0)),
    "tiny": (2.0**-130, (0, 0), (0.125, 0)),
    "rounds down": (1.7421875 * 2.0**-119, (0, 0), (448, 0)),
    "half": (1.75 * 2.0**-119, (0, 0), (448, 0)),
    "rounds up": (1.7578125 * 2.0**-119, (0, 0), (224, 1)),
    "huge": (2.0**127, (256, 246), (256, 246)),
    "inf": (math.inf, (None, 255), (None, 255)),
    "nan": (math.nan, (None, 255), (None, 255)),
}
_ROWS, _INNER, _COLUMNS = 5, 70, 4
_GROUPS = [2, 0, 3]


def _input(shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.linspace(-20, 20, x.numel()).exp2().view(shape)).bfloat16()


def _matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _product(x, weight, x_scale, scale, **options):
    e8m0 = torch_npu.float8_e8m0fnu
    return torch_npu.npu_quant_matmul(
        x, weight, scale, scale_dtype=e8m0, pertoken_scale=x_scale, pertoken_scale_dtype=e8m0, **options
    )


def _grouped(x, weight, x_scale, scale, dtype=None, **options):
    e8m0 = torch_npu.float8_e8m0fnu
    dtypes = {"x_dtype": dtype or x.dtype, "weight_dtype": dtype or weight.dtype}
    dtypes |= {"scale_dtype": e8m0, "per_token_scale_dtype": e8m0}
    groups = {"group_list": torch.tensor(_GROUPS).npu(), "group_list_type": 1, "group_type": 0, "split_item": 2}
    lists = {"scale": [scale], "per_token_scale": [x_scale]}
    [y] = torch_npu.npu_grouped_matmul([x], [weight], **lists, **dtypes, **(groups | options))
    return y


def _floats(x, scale, axis, dtype=None):
    return torch_npu.npu_anti_mx_quant(x, scale, axis=axis, dst_type=torch.float32, src_type=dtype or x.dtype).cpu()


def _products_of_4_bits():
    """Return products of 4-bit numbers with these numbers, and refusals."""
    (x, x_scale), (weights, scale) = (
        torch_npu.npu_dynamic_mx_quant(_matrix(*shape, 64, seed=seed).npu())
        for seed, shape in enumerate([(_ROWS,), (3, _COLUMNS)])
    )
    of_first = scale[0].transpose(0, 1)
    product = functools.partial(_product, x1_dtype=_FLOAT4, x2_dtype=_FLOAT4, group_sizes=[1, 1, 32])
    product = functools.partial(product, output_dtype=torch.float32)
    grouped = functools.partial(_grouped, dtype=_FLOAT4, output_dtype=torch.bfloat16)
    byte, byte_scale = torch_npu.npu_dynamic_mx_quant(_matrix(_ROWS, 64).npu(), dst_type=torch.float8_e4m3fn)
    zeros = x.new_zeros
    refused = {
        "rows": lambda: product(zeros(5, 64), zeros(128, 2), zeros(5, 2, 2), zeros(2, 4, 2)),
        "part": lambda: product(x[1:], weights[0].t(), x_scale[1:], of_first),
        "odd": lambda: product(x[:, :16].contiguous(), weights[0, :, :16].contiguous().t(), x_scale, of_first),
        "8 bits": lambda: product(byte, weights[0].t(), byte_scale, of_first, x1_dtype=byte.dtype),
        "largest": lambda: torch_npu.npu_dynamic_mx_quant(_matrix(2, 32).npu(), scale_alg=2),
    }
    return {
        "numbers": [_floats(x, x_scale, -1, _FLOAT4), _floats(weights, scale, -1, _FLOAT4)],
        "product": product(x, weights[0].t(), x_scale, of_first).cpu(),
        "grouped": grouped(x, weights.transpose(1, 2), x_scale, scale.transpose(1, 2)).cpu(),
        "errors": {name: error_of(call) for name, call in refused.items()},
    }


def _refusals(x, operands, grouped):
    halves = {"output_dtype": torch.bfloat16}
    blocks = {"group_sizes": [1, 1, 32], **halves}
    quantize = functools.partial(torch_npu.npu_dynamic_mx_quant, dst_type=torch.float8_e5m2)
    calls = {
        "float4": lambda: torch_npu.npu_dynamic_mx_quant(x, dst_type=torch_npu.float4_e1m2fn_x2),
        "round": lambda: quantize(x, round_mode="floor"),
        "algorithm": lambda: quantize(x, scale_alg=2),
        "bound": lambda: quantize(x, max_low_bound=1.0),
        "negative bound": lambda: quantize(x, scale_alg=1, max_low_bound=-1.0),
        "type": lambda: quantize(x, dst_type_max=6.0),
        "blocks of floats": lambda: quantize(x.float(), block_size=64),
        "short floats": lambda: quantize(x[:, :31].float()),
        "groups": lambda: _product(*operands, **halves),
        "weight": lambda: _grouped(grouped[0], grouped[1].view(torch.int8), *grouped[2:], **halves),
        "scales": lambda: _product(*operands[:2], operands[2][:3], operands[3], **blocks),
        "batches": lambda: _product(operands[0][None], *operands[1:], **blocks),
        "bias": lambda: _product(*operands, bias=torch.zeros(4).half().npu(), **blocks),
        "integers": lambda: _product(*operands, **blocks | {"output_dtype": torch.int32}),
        "scale of floats": lambda: torch_npu.npu_quant_matmul(
            *operands[:2],
            torch.ones(4).npu(),
            pertoken_scale=operands[2],
            pertoken_scale_dtype=torch_npu.float8_e8m0fnu,
            **blocks,
        ),
        "int8": lambda: _product(*(each.view(torch.int8) for each in operands[:2]), *operands[2:], **halves),
        "bias of groups": lambda: _grouped(*grouped, bias=[torch.zeros(3, 4).npu()], **halves),
        "groups of columns": lambda: _grouped(grouped[0].t(), grouped[0], *grouped[2:], group_type=2, **halves),
        "other functions": lambda: torch_npu.npu_swiglu(operands[0]),
    }
    return {name: error_of(call) for name, call in calls.items()}


def _compute():
    """Return the results of a simulated Ascend950 as CPU tensors."""
    found = {}
    for dtype, algorithm, name in _QUANTIZED:
        axis, shape = _AXES[name]
        y, scale = torch_npu.npu_dynamic_mx_quant(_input(shape).npu(), axis=axis, dst_type=dtype, scale_alg=algorithm)
        found[dtype, algorithm, name] = scale.cpu(), _floats(y, scale, axis, dtype)
    for mode in _ROUNDED:
        y, scale = torch_npu.npu_dynamic_mx_quant(torch.tensor(_NOT_EXACT).bfloat16().npu(), round_mode=mode)
        found[mode] = y.cpu().tolist(), _floats(y, scale, -1, _FLOAT4).tolist()
    found["4 bits"] = _products_of_4_bits()
    e4m3 = {"dst_type": torch.float8_e4m3fn}
    ones = torch.ones(1, 32)
    for (name, (value, *_)), algorithm in itertools.product(_SPECIAL.items(), (0, 1)):
        x = torch.cat([torch.full((1, 32), value), ones], 1)
        y, scale = torch_npu.npu_dynamic_mx_quant(x.npu(), scale_alg=algorithm, **e4m3)
        found[name, algorithm] = y.cpu().float(), scale.cpu().flatten().tolist()
    x = torch.cat([ones, torch.zeros(1, 32)], 1)
    _, scale = torch_npu.npu_dynamic_mx_quant(x.npu(), scale_alg=1, max_low_bound=896.0, **e4m3)
    found["bound"] = scale.cpu().flatten().tolist()
    for algorithm in (0, 1):
        x, options = _matrix(3, 70).npu(), {"scale_alg": algorithm, **e4m3}
        both = torch_npu.npu_dynamic_mx_quant_with_dual_axis(x, **options)
        single = [torch_npu.npu_dynamic_mx_quant(x, axis=axis, **options) for axis in (-1, -2)]
        found["two axes", algorithm] = [one.cpu().view(torch.uint8) for one in both]
        found["one axis", algorithm] = [one.cpu().view(torch.uint8) for pair in single for one in pair]
    y, scale = torch_npu.npu_dynamic_mx_quant(_input((3, 130)).npu(), block_size=64, scale_alg=1, **e4m3)
    found["blocks of 64"] = y.cpu().float(), scale.cpu()

    x, x_scale = torch_npu.npu_dynamic_mx_quant(_matrix(_ROWS, _INNER).npu(), dst_type=torch.float8_e4m3fn)
    weights = _matrix(3, _COLUMNS, _INNER, seed=1).npu()
    weight, scale = torch_npu.npu_dynamic_mx_quant(weights, dst_type=torch.float8_e5m2)
    found["x"], found["weights"] = _floats(x, x_scale, -1), _floats(weight, scale, -1)
    operands = x, weight[0].t(), x_scale, scale[0].transpose(0, 1)
    bias, sizes = torch.arange(4.0).npu(), [1, 1, 32]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found["product", dtype] = _product(*operands, bias=bias, group_sizes=sizes, output_dtype=dtype).cpu()
    grouped = x, weight.transpose(1, 2), x_scale, scale.transpose(1, 2)
    found["grouped"] = _grouped(*grouped, output_dtype=torch.bfloat16).cpu()
    found["errors"] = _refusals(_matrix(2, 32).npu(), operands, grouped)
    for dtype in _DTYPES:
        every = torch.arange(256).to(torch.uint8).view(16, 16).npu().view(dtype)
        same = [every.t().contiguous().t(), every.clone(), torch.cat([every[:3], every[3:]])]
        found["copies", dtype] = [copy.cpu().view(torch.uint8).flatten().tolist() for copy in same]
        found["floats", dtype] = [every.t().to(to).t().cpu() for to in (torch.float32, torch.float16, torch.bfloat16)]
        refused = every.int, functools.partial(every.float().to, dtype)
        found["conversions", dtype] = [error_of(call) for call in refused]
    return found


@pytest.fixture(scope="module")
def computed():
    return on_npu(_compute, HOST_NPU_SOC="Ascend950")


def _blocks(x, axis, size=32):
    """Return x with its blocks in the last two dimensions, padded with zeros."""
    rows = x.double().movedim(axis, -1)
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % size)).unflatten(-1, (-1, size))


def _scales(x, axis, dtype, algorithm, size=32):
    largest = _blocks(x, axis, size).abs().amax(-1)
    limit, _ = _NUMBERS[dtype]
    if algorithm == 0:
        return (largest.log2().floor() - math.floor(math.log2(limit))).exp2()
    return (largest / limit).log2().ceil().exp2()


def _in_pairs(scales):
    exponents = scales.log2() + 127
    return torch.nn.functional.pad(exponents, (0, exponents.shape[-1] % 2)).unflatten(-1, (-1, 2))


@pytest.mark.parametrize(("dtype", "algorithm", "axis"), _QUANTIZED, ids=str)
def test_a_block_has_the_power_of_two_of_its_largest_number(dtype, algorithm, axis, computed):
    scale, _ = computed[dtype, algorithm, axis]
    dim, shape = _AXES[axis]
    expected = _in_pairs(_scales(_input(shape), dim, dtype, algorithm))
    assert torch.equal(scale.double(), expected.movedim(-2, dim % len(shape)))


@pytest.mark.parametrize(("dtype", "algorithm", "axis"), _QUANTIZED, ids=str)
def test_a_number_is_rounded_to_its_dtype_or_saturates(dtype, algorithm, axis, computed):
    _, floats = computed[dtype, algorithm, axis]
    dim, shape = _AXES[axis]
    x, limit, bits = _input(shape), *_NUMBERS[dtype]
    scales = _scales(x, dim, dtype, algorithm).unsqueeze(-1)
    exact = _blocks(x, dim).clamp(-limit * scales, limit * scales)
    error = (_blocks(floats, dim) - exact).abs()
    assert (error <= torch.maximum(exact.abs() * 2.0 ** -(bits + 1), _LEAST[dtype] / 2 * scales)).all()
    saturates = (_blocks(x, dim).abs() > limit * scales).any()
    assert not saturates if algorithm else saturates


@pytest.mark.parametrize("mode", _ROUNDED)
def test_numbers_of_4_bits_are_rounded_as_the_mode_says(mode, computed):
    pairs, numbers = computed[mode]
    assert numbers == _ROUNDED[mode]
    codes = [code for pair in pairs for code in (pair & 15, pair >> 4)]
    assert [code >> 3 for code in codes] == [int(number < 0) for number in _NOT_EXACT]
    assert [[0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] for code in codes] == [abs(number) for number in numbers]


def test_products_of_numbers_of_4_bits(computed):
    found = computed["4 bits"]
    x, weights = (numbers.double() for numbers in found["numbers"])
    torch.testing.assert_close(found["product"].double(), x @ weights[0].t(), rtol=2**-23, atol=1e-6)
    exact = torch.cat([part @ weight.t() for part, weight in zip(x.split(_GROUPS), weights, strict=True)])
    torch.testing.assert_close(found["grouped"].double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rows", "need the pairs of numbers in the dimension that is summed over"),
        ("part", "float4_e2m1 from the start of their memory only"),
        ("odd", "matrices of float4_e2m1 have K = 32, which is 1 blocks of 32 instead of an even number"),
        ("8 bits", "matrices in blocks have dtypes float8_e4m3fn and float4_e2m1fn_x2 instead of float8_e4m3fn or"),
        ("largest", "scaleAlg is 2 instead of 0, the only one that the host NPU has for float4_e2m1"),
    ],
)
def test_products_of_numbers_of_4_bits_that_are_refused(name, sentence, computed):
    assert sentence in computed["4 bits"]["errors"][name]


def test_blocks_of_another_size_have_a_scale_each(computed):
    y, scale = computed["blocks of 64"]
    x, dtype = _input((3, 130)), torch.float8_e4m3fn
    scales = _scales(x, -1, dtype, 1, size=64)
    numbers = _blocks(x, -1, size=64) / scales.unsqueeze(-1)
    assert torch.equal(scale.double(), _in_pairs(scales))
    assert torch.equal(y, numbers.flatten(-2)[:, :130].float().to(dtype).float())


@pytest.mark.parametrize("algorithm", [0, 1])
@pytest.mark.parametrize("name", _SPECIAL)
def test_a_block_of_zeros_of_numbers_near_the_limits_and_of_such_that_are_not_finite(name, algorithm, computed):
    y, scales = computed[name, algorithm]
    numbers, scale = _SPECIAL[name][1 + algorithm]
    assert scales == [scale, 127 - 8]
    assert y[0, :32].isnan().all() if numbers is None else (y[0, :32] == numbers).all()
    assert (y[0, 32:] == 256).all()


def test_the_largest_number_has_a_lower_bound(computed):
    assert computed["bound"] == [127 + 1, 0]


@pytest.mark.parametrize("algorithm", [0, 1])
def test_two_axes_are_quantized_as_each_alone(algorithm, computed):
    assert all(map(torch.equal, computed["two axes", algorithm], computed["one axis", algorithm]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_product_is_that_of_the_numbers_times_their_scales(dtype, computed):
    exact = computed["x"].double() @ computed["weights"][0].double().t() + torch.arange(4)
    torch.testing.assert_close(computed["product", dtype].double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_groups_of_rows_are_multiplied_with_their_matrices(computed):
    x, weights = computed["x"].double(), computed["weights"].double()
    rows = x.split(_GROUPS)
    exact = torch.cat([part @ weight.t() for part, weight in zip(rows, weights, strict=True)])
    torch.testing.assert_close(computed["grouped"].double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("float4", "yOut has dtype float4_e1m2 instead of float8_e4m3fn, float8_e5m2 or float4_e2m1"),
        ("round", "roundMode is floor instead of rint"),
        ("algorithm", "scaleAlg is 2 instead of 0 or 1"),
        ("bound", "maxLowBound is 1 with scaleAlg 0"),
        ("negative bound", "maxLowBound is -1 with scaleAlg 1"),
        ("type", "dstTypeMax is 6 instead of 0"),
        ("blocks of floats", "blocksize is 64 instead of 32, which float32 needs"),
        ("short floats", "x has 31 numbers along the axis instead of at least 32, which float32 needs"),
        ("groups", "multiplies int8 matrices only"),
        ("weight", "matrices in blocks have dtypes float8_e4m3fn and int8 instead of float8_e4m3fn or float8_e5m2"),
        ("scales", "a scale has shape [3, 2, 2] instead of [5, 2, 2]"),
        ("batches", "matrices in blocks have shapes [1, 5, 70] and [70, 4] instead of [M, K] and [K, N]"),
        ("bias", "bias has dtype float16 instead of float32"),
        ("integers", "out has dtype int32 instead of float16, bfloat16 or float32"),
        ("scale of floats", "matrices in blocks need x1Scale and x2Scale of dtype float8_e8m0fnu"),
        ("int8", "x2Scale has dtype float8_e8m0fnu"),
        ("bias of groups", "multiplies groups of blocks without a bias"),
        ("groups of columns", "one x of rows in groups (group_type 0)"),
        ("other functions", "float8_e4m3fn"),
    ],
)
def test_what_the_documents_do_not_have_is_refused_by_name(name, sentence, computed):
    assert sentence in computed["errors"][name]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_numbers_of_8_bits_are_copied_and_converted_to_floats(dtype, computed):
    every = torch.arange(256).to(torch.uint8)
    assert computed["copies", dtype] == [every.tolist()] * 3
    for floats in computed["floats", dtype]:
        expected = every.view(16, 16).view(dtype).to(floats.dtype)
        assert torch.equal(floats.isnan(), expected.isnan())
        assert torch.equal(floats.nan_to_num(), expected.nan_to_num())
    for error in computed["conversions", dtype]:
        assert "the host NPU does not convert float" in error


def test_other_chips_have_no_blocks():
    x, scale = torch.zeros(2, 32, dtype=torch.int8).npu(), torch.zeros(2, 1, 2, dtype=torch.uint8).npu()
    with pytest.raises(RuntimeError, match="only the Ascend950 has numbers in MX formats"):
        torch_npu.npu_dynamic_mx_quant(_matrix(2, 32).npu(), dst_type=torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="only the Ascend950 has numbers in MX formats"):
        torch_npu.npu_anti_mx_quant(x.view(torch.float8_e4m3fn), scale)
    with pytest.raises(RuntimeError, match="float8_e4m3fn, which the operator does not take on this chip"):
        x.view(torch.float8_e4m3fn).float()


_ENDS = [3, 3, 7]


def _gated_units():
    """Return gated units of groups of rows in blocks and their inputs, and refusals."""
    e8m0 = torch_npu.float8_e8m0fnu
    quantize = functools.partial(torch_npu.npu_dynamic_mx_quant, dst_type=torch.float8_e4m3fn)
    gated = torch_npu.npu_grouped_matmul_swiglu_quant_v2
    groups = torch.tensor(_ENDS).npu()
    (x, x_scale), (weight, scale) = quantize(_matrix(9, 96).npu()), quantize(_matrix(3, 96, 256).npu(), axis=1)
    modes = {"dequant_mode": 2, "quant_mode": 2, "quant_dtype": torch.float8_e4m3fn}
    modes |= {"weight_scale_dtype": e8m0, "x_scale_dtype": e8m0}
    y, y_scale = gated(x, [weight], [scale], x_scale, groups, **modes)
    integers = (
        torch.randint(-128, 128, (9, 32), dtype=torch.int8),
        torch.randint(-128, 128, (3, 32, 64), dtype=torch.int8),
    )
    floats = torch.rand(3, 64), torch.rand(9)
    given = [each.npu() for each in (*integers, *floats)]
    found = gated(given[0], [given[1]], [given[2]], given[3], groups)
    return {
        "mx": [_floats(y, y_scale, -1)[:7], _floats(x, x_scale, -1), _floats(weight, scale, 1)],
        "int8": [each.cpu() for each in found] + [*integers, *floats],
        "scales": error_of(
            lambda: gated(given[0], [given[1]], [given[2]], x_scale[:, 0, 0], groups, x_scale_dtype=e8m0)
        ),
        "modes": error_of(lambda: gated(x, [weight], [scale], x_scale, groups, **(modes | {"quant_mode": 0}))),
    }


def _units(x, matrices):
    parts = [x[first:last] for first, last in itertools.pairwise([0, *_ENDS])]
    gate, up = torch.cat([rows @ matrix for rows, matrix in zip(parts, matrices, strict=True)]).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def test_gated_units_of_groups_are_quantized_from_weights_in_rows():
    found = on_npu(_gated_units, HOST_NPU_SOC="Ascend950")
    y, x, matrices = (each.double() for each in found["mx"])
    units = _units(x, matrices)
    # Three mantissa bits, and saturation.
    largest = units.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    assert ((y - units).abs() <= units.abs() / 8 + largest * 2**-9).all()
    y, of_row, x, matrices, scale, of_token = (each.double() for each in found["int8"])
    units = _units(x * of_token[:, None], matrices * scale[:, None])
    torch.testing.assert_close(of_row[:7], units.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    assert (y[:7] - units / of_row[:7, None]).abs().max() <= 0.5 + 1e-3
    assert "xScale, output and outputScale are not those of x in int8" in found["scales"]
    assert "x has dtype float8_e4m3fn with dequantMode 2 and quantMode 0" in found["modes"]
