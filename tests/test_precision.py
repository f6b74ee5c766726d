"""The page of errors against float64: what its generator counts, and that the page has all that it would write."""

from torch_aclnn_ops import ops

import pytest
import torch

from benchmarks import errors
from benchmarks._errors_cases import CASES, Draw
from tests.test_layout import FUNCTIONS

EPS = torch.finfo(torch.float16).eps


def _table(text):
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


PAGE = _table(errors.PAGE.read_text())


@pytest.mark.parametrize(
    "result, truth, expected",
    [
        ([1.0, 2.0], [1.0, 2.0], [0, 0]),
        ([1 + EPS, 2.0], [1.0, 2.0], [1, 0]),
        ([4.0, 4.0], [4.0, 4 + 2 * EPS], [0, 0.5]),  # the steps are four times as large there
        ([EPS, 2.0], [0.0, 2.0], [1, 0]),  # counted at the mean magnitude, 1
        ([float("nan"), float("inf")], [1.0, 1.0], [float("inf")] * 2),
        ([float("inf"), float("-inf")], [1e9, 1e9], [0, float("inf")]),  # too large for the dtype
        ([0.0, 0.0], [2.0**-24, 2.0**-24], [1, 1]),  # the smallest number
    ],
)
def test_errors_are_measured_in_ulps(result, truth, expected):
    result, truth = (torch.tensor(values, dtype=torch.float64) for values in (result, truth))
    assert errors.ulps(result, truth, torch.float16).tolist() == expected


@pytest.mark.parametrize("operator", sorted({case.operator for case in CASES}))
def test_the_generator_measures_small_arguments_of_every_dtype(operator):
    case = next(case for case in CASES if case.operator == operator)
    rows = list(errors.rows([case], is_small=True))
    assert {row["dtype"] for row in rows} == {"float32", "float16", "bfloat16"}
    for row in rows:
        largest, mean = map(float, row["CPU"].split(";"))
        assert 0 <= mean < 64 and 0 <= largest < 64, row
    assert set(rows[0]) == set(PAGE[0]) - {"host NPU", "NPU"}


def test_the_page_has_the_rows_of_every_case_and_dtype():
    written = [tuple(list(row.values())[:4]) for row in PAGE]
    expected = [
        tuple(errors.key_of(case, dtype, name).values())
        for case in CASES
        for dtype in errors.DTYPES
        for name in case.ours(*case.draw(Draw(dtype, is_small=True)))
    ]
    assert written == expected, "run `make precision`"


def test_the_page_has_every_operator_with_its_device_implementation():
    named = {row["operator"].strip("`") for row in PAGE}
    drop_ins = {name for name in FUNCTIONS if f"{name}_backward" not in ops.__all__}
    assert named == set(ops.__all__) | drop_ins - {"embedding", "fused_ema_adam"}
    for operator in named:
        assert any(row["host NPU"] != errors.NOT_TAKEN for row in PAGE if row["operator"] == f"`{operator}`")
