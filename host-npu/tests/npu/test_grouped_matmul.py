"""Grouped products with one matrix per group on the host NPU, against loops in float64."""

import pytest
import torch
import torch_npu
from tests._values import assert_near, called, refused

_SIZES = (3, 0, 5)
_ONE_GROUP = torch.tensor([3])
_LISTS = {0: [3, 3, 8], 1: [3, 0, 5], 2: [[0, 3], [2, 5], [1, 0]]}


def _multiplied(x, weight, **options):
    """Return the products of groups of rows, by default of _SIZES, with one matrix each."""
    x, weight = (each if isinstance(each, list) else [each] for each in (x, weight))
    rows = {"group_list": torch.tensor(_LISTS[0]), "group_type": 0, "split_item": 3}
    [result] = called(torch_npu.npu_grouped_matmul, x, weight, **(rows | options))
    return result


def _int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("split_item", [0, 3], ids=["an output for each", "one output"])
def test_groups_of_rows_are_multiplied_by_the_matrix_of_their_expert(split_item):
    x, weights = torch.randn(8, 4), [torch.randn(4, 6) for _ in range(3)]
    biases = [torch.randn(6) for _ in weights]
    options = {"bias": biases, "group_list": [3, 3, 8], "split_item": split_item}
    results = called(torch_npu.npu_grouped_matmul, [x], weights, **options)
    expected = [
        rows.double() @ weight.double() + bias.double()
        for rows, weight, bias in zip(x.split([3, 0, 5]), weights, biases, strict=True)
    ]
    for actual, wanted in zip(results, expected if split_item == 0 else [torch.cat(expected)], strict=True):
        assert_near(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", _LISTS, ids=["ends", "sizes", "pairs"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_tensor_says_which_rows_are_a_groups(biased, kind, dtype):
    x, weight = torch.randn(8, 4).to(dtype), torch.randn(3, 4, 6).to(dtype)
    bias = torch.randn(3, 6).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    result = _multiplied(
        x, weight, bias=[bias] if biased else None, group_list=torch.tensor(_LISTS[kind]), group_list_type=kind
    )
    parts = zip(x.double().split(_SIZES), weight.double(), bias.double(), strict=True)
    assert_near(result, torch.cat([rows @ matrix + (added if biased else 0) for rows, matrix, added in parts]))


@pytest.mark.parametrize(("kind", "groups"), [(0, [2, 5]), (1, [2, 3])], ids=["ends", "sizes"])
def test_rows_after_the_last_group_are_nan(kind, groups):
    x, weight = torch.randn(8, 4), torch.randn(2, 4, 6)
    result = _multiplied(x, weight, group_list=torch.tensor(groups), group_list_type=kind)
    assert_near(result[:5], torch.cat([x[:2].double() @ weight[0].double(), x[2:5].double() @ weight[1].double()]))
    assert result[5:].isnan().all()


@pytest.mark.parametrize(
    ("act_type", "function"),
    [
        (1, torch.relu),
        (2, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        (4, lambda x: x * torch.sigmoid(1.702 * x)),
        (5, torch.nn.functional.silu),
    ],
    ids=["relu", "gelu", "fast gelu", "silu"],
)
def test_a_quantized_product_may_have_an_activation(act_type, function):
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((8, 4), (3, 4, 6)))
    scale = torch.rand(3, 6) / 4096
    result = _multiplied(x, weight, scale=[scale], act_type=act_type, output_dtype=torch.float16)
    parts = zip(x.double().split(_SIZES), weight.double(), scale.double(), strict=True)
    assert_near(result, function(torch.cat([rows @ matrix * each for rows, matrix, each in parts])))


def test_int8_matrices_have_scales_of_rows_and_columns():
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((8, 4), (3, 4, 6)))
    scale, of_rows = torch.rand(3, 6), torch.rand(8)
    result = _multiplied(x, weight, scale=[scale], per_token_scale=[of_rows], output_dtype=torch.float16)
    parts = zip(x.double().split(_SIZES), weight.double(), scale.double(), strict=True)
    exact = torch.cat([rows @ matrix * each for rows, matrix, each in parts]) * of_rows.double()[:, None]
    assert_near(result, exact)


def test_int8_matrices_may_stay_sums():
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((8, 4), (3, 4, 6)))
    result = _multiplied(x, weight, output_dtype=torch.int32)
    parts = zip(x.long().split(_SIZES), weight.long(), strict=True)
    assert result.tolist() == torch.cat([rows @ matrix for rows, matrix in parts]).tolist()


def test_int8_matrices_may_become_int8_by_the_bits_of_a_scale():
    x, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((8, 4), (3, 4, 6)))
    scale, offset = torch.full((18,), 2.0**-7), torch.arange(-9.0, 9)
    bits = torch_npu.npu_trans_quant_param(scale.npu(), offset.npu()).view(3, 6)
    result = _multiplied(x, weight, scale=[bits], output_dtype=torch.int8)
    sums = torch.cat([rows @ matrix for rows, matrix in zip(x.double().split(_SIZES), weight.double(), strict=True)])
    shifted = sums * 2.0**-7 + offset.view(3, 6).repeat_interleave(torch.tensor(_SIZES), 0)
    assert result.tolist() == shifted.round().clamp(-128, 127).tolist()


def test_int8_matrices_of_a_list_of_ends_become_int8():
    x, weights, biases = _int8(8, 4), [_int8(4, 6) for _ in range(3)], [torch.randint(-9, 9, (6,)).int() for _ in "abc"]
    scales = [torch.full((6,), 2.0 ** -(6 + group)) for group in range(3)]
    offset = torch.full((6,), -5.0)
    [result] = torch_npu.npu_grouped_matmul(
        [x.npu()], [each.npu() for each in weights], bias=[each.npu() for each in biases],
        scale=[torch_npu.npu_trans_quant_param(each.npu(), offset.npu()) for each in scales], group_list=[3, 3, 8],
        split_item=3,
    )  # fmt: skip
    parts = zip(x.double().split(_SIZES), weights, biases, scales, strict=True)
    exact = torch.cat([(rows @ weight.double() + bias) * scale + offset for rows, weight, bias, scale in parts])
    assert result.tolist() == exact.round().clamp(-128, 127).tolist()


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.usefixtures("private_formats")
def test_products_of_groups_are_added_up_by_token(kind, has_shared):
    x, weight, rows = _int8(8, 64), _int8(3, 64, 32), torch.tensor([3, 0, 0, 2, 1, 3, 2, 1])
    scale, of_row, logit = torch.rand(3, 32) / 99, torch.rand(8), torch.rand(8)
    shared = torch.randn(2, 32).bfloat16() if has_shared else None
    result = called(
        torch_npu.npu_grouped_matmul_finalize_routing, x, torch_npu.npu_format_cast(weight.npu(), 29),
        torch.tensor(_LISTS[kind]), scale=scale, pertoken_scale=of_row, shared_input=shared, logit=logit,
        row_index=rows, shared_input_weight=0.5, shared_input_offset=1, output_bs=4, group_list_type=kind,
    )  # fmt: skip
    parts = zip(x.double().split(_SIZES), weight.double(), scale, strict=True)
    products = torch.cat([part @ matrix * factor for part, matrix, factor in parts]) * (of_row * logit)[:, None]
    expected = torch.zeros(4, 32, dtype=torch.float64).index_add(0, rows, products)
    if shared is not None:
        expected[1:3] += 0.5 * shared.double()
    assert_near(result, expected)


@pytest.mark.parametrize("shifted", [False, True])
def test_weights_of_int8_are_dequantized_for_floats(shifted):
    x, weight = torch.randn(8, 4).half(), torch.randint(-128, 128, (3, 4, 6), dtype=torch.int8)
    scale, offset = torch.rand(3, 6).half(), torch.randint(-9, 9, (3, 6)).half()
    result = _multiplied(x, weight, antiquant_scale=[scale], antiquant_offset=[offset if shifted else offset * 0])
    whole = (weight.double() + (offset.double()[:, None] if shifted else 0)) * scale.double()[:, None]
    assert_near(result, torch.cat([rows @ each for rows, each in zip(x.double().split(_SIZES), whole, strict=True)]))


def test_groups_of_columns_give_a_product_each():
    x, weight = torch.randn(8, 4).half(), torch.randn(8, 6).half()
    result = _multiplied(x.npu().t(), weight, group_type=2)
    parts = zip(x.double().split(_SIZES), weight.double().split(_SIZES), strict=True)
    assert_near(result, torch.stack([rows.t() @ others for rows, others in parts]))


def test_products_of_groups_are_added_to_gradients():
    gradient = torch.randn(3, 4, 6)
    x, weight = torch.randn(8, 4).bfloat16(), torch.randn(8, 6).bfloat16()
    ends = torch.tensor(_LISTS[0]).npu()
    result = torch_npu.npu_grouped_matmul_add(gradient.npu(), x.npu(), weight.npu(), ends)
    parts = zip(x.double().split(_SIZES), weight.double().split(_SIZES), strict=True)
    expected = gradient.double() + torch.stack([rows.t() @ others for rows, others in parts])
    assert_near(result, expected)
    on_npu = gradient.npu()
    torch_npu.npu_grouped_matmul_add_(on_npu, x.npu(), weight.npu(), ends)
    assert_near(on_npu, expected)


_HALF, _BF16 = torch.zeros(8, 4).half(), torch.zeros(8, 4).bfloat16()
_INT8, _FLOAT = torch.zeros(8, 4, dtype=torch.int8), torch.zeros(8, 4)
_COMBINED = "these dtypes cannot be combined: "
_OF_TOKENS = "per_token_scale is for products of int8 matrices that have a scale only, as one tensor"


def _zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="npu")


def _rows(**dtypes: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """Return an argument for each name, with a row for each group."""
    return {name: [_zeros(dtype, 3, 6)] for name, dtype in dtypes.items()}


_INT8_OUT, _SCALES = {"output_dtype": torch.int8}, [_zeros(torch.float32, 8)]
_SCALED = _rows(scale=torch.float32)
_ANTIQUANT = _rows(antiquant_scale=torch.bfloat16, antiquant_offset=torch.half)
_OF_ALL, _SCALED_BY_ALL = [_zeros(torch.half, 6)], {"scale": [_zeros(torch.float32, 6)], "output_dtype": torch.half}


@pytest.mark.parametrize(
    ("x", "weight", "arguments", "sentence"),
    [
        (_INT8, torch.int8, {}, f"{_COMBINED}x int8, weight int8, out int8"),
        (_HALF, torch.half, _INT8_OUT, f"{_COMBINED}x float16, weight float16, out int8"),
        (_HALF, torch.half, _rows(scale=torch.bfloat16), f"{_COMBINED}x .*, scale bfloat16, out float16"),
        (_HALF, torch.bfloat16, {}, f"{_COMBINED}x float16, weight bfloat16, out float16"),
        (_FLOAT, torch.half, {}, f"{_COMBINED}x float32, weight float16, out float32"),
        (_HALF, torch.half, _rows(bias=torch.float32), f"{_COMBINED}x .*, bias float32, out float16"),
        (_BF16, torch.bfloat16, _rows(bias=torch.half), f"{_COMBINED}x .*, bias float16, out bfloat16"),
        (
            _INT8,
            torch.int8,
            _SCALED | {"output_dtype": torch.bfloat16},
            f"{_COMBINED}x .*, scale float32, out bfloat16",
        ),
        (_HALF, torch.int8, _ANTIQUANT, "antiquantScaleOptional has dtype bfloat16 instead of that of x, float16"),
        (_HALF, torch.half, {"act_type": 1}, "act_type is 1; only products of int8 matrices have an activation"),
        (_HALF, torch.half, {"per_token_scale": _SCALES}, _OF_TOKENS),
        (_INT8, torch.int8, _SCALED | {"output_dtype": torch.float16, "per_token_scale": _SCALES * 2}, _OF_TOKENS),
        (_HALF, torch.half, {"bias": _OF_ALL}, r"bias has shape \[6\] instead of \[3, 6\], a row for"),
        (_INT8, torch.int8, _SCALED_BY_ALL, r"scale has shape \[6\] instead of \[3, 6\]"),
        (_HALF, torch.int8, {"antiquant_scale": _OF_ALL, "antiquant_offset": _OF_ALL}, "antiquant_scale has shape"),
        (_HALF, torch.half, {"group_list": torch.tensor([3, 8])}, r"group_list of shape \[2\] does not fit 3 groups"),
        (_HALF, torch.half, {"act_type": 3}, "act types 0, 1, 2, 4 and 5 only"),
        (_HALF, torch.half, _rows(antiquant_scale=torch.half), "must be given for floats times int8"),
    ],
)
def test_what_does_not_go_together_is_refused_at_the_call(x, weight, arguments, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        _multiplied(x, _zeros(weight, 3, 4, 6), **arguments)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "sentence"),
    [
        (_HALF, torch.bfloat16, None, f"{_COMBINED}x float16, weight bfloat16, out float16"),
        (_FLOAT, torch.half, None, f"{_COMBINED}x float32, weight float16, out float32"),
        (_HALF, torch.half, torch.float32, f"{_COMBINED}x float16, weight float16, bias float32, out float16"),
        (_HALF, torch.int8, None, "multiplies groups by their ends without an offset and an anti"),
    ],
)
def test_a_list_of_ends_takes_the_same_dtypes(x, weight, bias, sentence):
    biases = None if bias is None else [_zeros(bias, 6)] * 3
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_grouped_matmul(
            [x.npu()], [_zeros(weight, 4, 6)] * 3, bias=biases, group_list=[3, 3, 8], split_item=3
        )


@pytest.mark.parametrize(
    ("kind", "groups", "sentence"),
    [
        (1, [5, -3, 6], "group_list has the negative size -3"),
        (2, [[0, 5], [1, -3], [2, 6]], "group_list has the negative size -3"),
        (1, [5, 3, 2], "the groups have more than 8 rows"),
        (2, [[0, 5], [3, 1], [2, 0]], "group_list has the group 3 of 3"),
    ],
    ids=["size", "pair", "sum", "group"],
)
def test_sizes_that_are_wrong_end_the_operator(kind, groups, sentence):
    with refused(sentence):
        _multiplied(_HALF, _zeros(torch.half, 3, 4, 6), group_list=torch.tensor(groups), group_list_type=kind)


@pytest.mark.parametrize("rows", [{"group_type": -1, "split_item": 0, "group_list": None}, {"group_list": _ONE_GROUP}])
def test_one_group_has_a_bias_and_scales_of_its_own(rows):
    x, weight, bias = torch.randn(3, 4).half(), torch.randint(-9, 9, (4, 6), dtype=torch.int8), torch.randn(6).half()
    scale, offset = torch.rand(6).half(), torch.randn(6).half()
    result = _multiplied(x, weight, bias=[bias], antiquant_scale=[scale], antiquant_offset=[offset], **rows)
    assert_near(result, x.double() @ ((weight.double() + offset.double()) * scale.double()) + bias.double())


@pytest.mark.parametrize("name", ["antiquant_scale", "antiquant_offset"])
def test_each_group_has_numbers_of_its_own(name):
    numbers = {option: [_HALF[0]] * 3 for option in ("antiquant_scale", "antiquant_offset")}
    numbers[name] = numbers[name][:2]
    with refused("is a list of 2 tensors for 3 groups"):
        _multiplied(
            torch.zeros(6, 4).half(),
            [torch.zeros(4, 4, dtype=torch.int8)] * 3,
            group_list=torch.tensor([2, 4, 6]),
            **numbers,
        )


@pytest.mark.parametrize("kind", [None, *_LISTS], ids=["no list", "ends", "sizes", "pairs"])
@pytest.mark.parametrize("biased", [False, True])
def test_several_matrices_of_rows_have_one_output(kind, biased):
    x = [torch.randn(rows, inner).half() for rows, inner in ((3, 4), (1, 8), (5, 2))]
    weights = [torch.randn(each.size(1), 6).half() for each in x]
    biases = [torch.randn(6).half() for _ in x]
    lists = {0: [3, 4, 9], 1: [3, 1, 5], 2: [[0, 3], [1, 1], [2, 5]]}
    groups = {"group_list": None if kind is None else torch.tensor(lists[kind]), "group_list_type": kind or 0}
    result = _multiplied(x, weights, bias=biases if biased else None, **groups)
    parts = zip(x, weights, biases, strict=True)
    assert_near(result, torch.cat([a.double() @ w.double() + (b.double() if biased else 0) for a, w, b in parts]))


def test_a_list_says_the_rows_that_several_matrices_have():
    with refused("group_list has 2 rows for the group 0 where x has 3"):
        _multiplied([_HALF[:3], _HALF[3:]], [_zeros(torch.half, 4, 6)] * 2, group_list=torch.tensor([2, 8]))
