"""Products with weights in FRACTAL_NZ, as in serving, against weights in rows."""

import pytest
import torch
import torch_npu
from tests._values import assert_rows_quantized
from torch.nn import functional

_NZ = 29

pytestmark = pytest.mark.usefixtures("private_formats")


def _tiled(rows):
    tiled = torch_npu.npu_format_cast(rows.npu(), _NZ)
    assert torch_npu.get_npu_format(tiled) == _NZ
    return tiled


def _int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("shape", [(32, 64), (40, 20)], ids=["whole tiles", "parts of tiles"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_a_quantized_product_takes_tiles(shape, transposed, dtype):
    x1, x2, scale = _int8(5, shape[0]), _int8(*shape), torch.rand(shape[1]) / 100
    tiled = _tiled(x2.t().contiguous()).t() if transposed else _tiled(x2)
    results = [
        torch_npu.npu_quant_matmul(x1.npu(), weight, scale.npu(), output_dtype=dtype) for weight in (tiled, x2.npu())
    ]
    assert torch.equal(*(each.cpu() for each in results))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (40, 20)], ids=["whole tiles", "parts of tiles"])
def test_grouped_products_take_tiles(shape, dtype):
    x, weight = torch.randn(8, shape[0]).to(dtype), torch.randn(3, *shape).to(dtype)
    groups = {"group_list": torch.tensor([3, 3, 8]).npu(), "group_type": 0, "split_item": 3}
    results = [torch_npu.npu_grouped_matmul([x.npu()], [each], **groups)[0] for each in (_tiled(weight), weight.npu())]
    assert torch.equal(*(each.cpu() for each in results))


_ROWS, _INNER, _OUTER, _ENDS = 9, 32, 64, [3, 3, 7]


def _units(x, weight, scale, tokens):
    """Return the gated units of the rows of each group, in float64."""
    parts = zip(x.double().split([3, 0, 4, 2])[:3], weight.double(), scale.double(), strict=True)
    sums = torch.cat([rows @ matrix * of_column for rows, matrix, of_column in parts]) * tokens.double()[:7, None]
    gate, up = sums.chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("version", ["first", "ends", "sizes"])
def test_gated_units_of_groups_are_quantized(version):
    x, weight = _int8(_ROWS, _INNER), _int8(3, _INNER, _OUTER)
    scale, tokens = torch.rand(3, _OUTER) / 100, torch.rand(_ROWS) / 100
    on_npu = [x.npu(), _tiled(weight), scale.npu(), tokens.npu()]
    if version == "first":
        quantized, of_row, _ = torch_npu.npu_grouped_matmul_swiglu_quant(
            on_npu[0], on_npu[1], torch.tensor(_ENDS).npu(), *on_npu[2:]
        )
    else:
        groups = torch.tensor(_ENDS if version == "ends" else [3, 0, 4]).npu()
        quantized, of_row = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            on_npu[0], [on_npu[1]], [on_npu[2]], on_npu[3], groups, group_list_type=int(version == "sizes")
        )
    assert_rows_quantized(quantized[:7], of_row[:7], _units(x, weight, scale, tokens))


def test_gated_units_need_tiles_on_this_chip():
    x, weight, groups = _int8(_ROWS, _INNER).npu(), _int8(3, _INNER, _OUTER).npu(), torch.tensor(_ENDS).npu()
    with pytest.raises(RuntimeError, match="weight has a base format; CANN takes FRACTAL_NZ on this chip"):
        torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            x, [weight], [torch.rand(3, _OUTER).npu()], torch.rand(_ROWS).npu(), groups
        )
