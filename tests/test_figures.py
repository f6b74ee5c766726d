"""The figures that pages quote are those that were measured: the files in benchmarks/results."""

import re
from decimal import Decimal
from pathlib import Path

import pytest

from benchmarks import _report
from benchmarks._figures import put_between
from benchmarks._results import RESULTS, read

ROOT = Path(__file__).parents[1]
AVX512, AVX2 = "amd-epyc-avx512-bf16-2-cores", "amd-epyc-avx2-2-cores"
_HEAD, _HEADS = f"{AVX512}/linear_cross_entropy", "2048 x 512 x 32000"
_KL = f"{AVX2}/linear_kl_div"


def _of_head(by: str) -> list[tuple[str, ...]]:
    """What a row of the table about the head quotes."""
    columns = ("ratio_of_medians", "ratio_of_minima", "peak_bytes")
    return [(_HEAD, _HEADS, dtype, by, column) for dtype in ("float32", "bfloat16") for column in columns]


def _of_divergence(by: str) -> list[tuple[str, ...]]:
    columns = ("median_s", "minimum_s", "ratio_of_medians", "ratio_of_minima", "peak_bytes")
    return [(_KL, "1024 x 256 x 32000", "float32", by, column) for column in columns]


def _of_step(*bys: str, column: str = "ratio_of_medians") -> list[tuple[str, ...]]:
    return [(f"{AVX512}/ema_adam", "200 tensors of 50,000 elements", "float32", by, column) for by in bys]


# The page, how a row of one of its tables begins, and what its figures are, in their order.
QUOTED = [
    (
        "README.md",
        "peak memory of a head's loss and gradients",
        [(_HEAD, _HEADS, "float32", by, "peak_bytes") for by in ("cross_entropy(linear(...))", "torch_aclnn_ops")],
    ),
    (
        "README.md",
        "time of a step of AdamW and averages",
        _of_step("AdamW(fused=True), swa_utils EMA", "FusedEmaAdam", "FusedEmaAdam(flatten=True)"),
    ),
    *(
        ("docs/linear_cross_entropy.md", row, _of_head(by))
        for row, by in (
            ("`cross_entropy(linear(...))`", "cross_entropy(linear(...))"),
            ("`torch.compile` of it", "torch.compile of cross_entropy(linear(...))"),
            ("torch, `options=None`", "torch, options=None"),
            ("torch, `batch_chunk_size=512`", "torch, batch_chunk_size=512"),
            ("torch_aclnn_ops", "torch_aclnn_ops"),
            ("limit: the matrix products alone", "limit: the matrix products alone"),
        )
    ),
    *(
        ("docs/losses_on_a_head.md", row, _of_divergence(by))
        for row, by in (
            ("`kl_div` of two `log_softmax(linear(...))`", "kl_div of two log_softmax(linear(...))"),
            ("Liger's implementation", "Liger's formula, chunks of 1024 rows"),
            ("`linear_kl_div` |", "torch_aclnn_ops"),
            ("`linear_kl_div`, reverse KL", "torch_aclnn_ops, reverse KL"),
            ("`linear_kl_div`, Jensen-Shannon", "torch_aclnn_ops, Jensen-Shannon"),
            ("the four matrix products alone", "limit: the matrix products alone"),
        )
    ),
    *(
        ("docs/optimizer.md", row, _of_step(by))
        for row, by in (
            ("torch, `AdamW(foreach=True)`", "AdamW(foreach=True), swa_utils EMA"),
            ("`FusedEmaAdam` |", "FusedEmaAdam"),
            ("`FusedEmaAdam(flatten=True)` |", "FusedEmaAdam(flatten=True)"),
            ("the same with new gradients", "FusedEmaAdam(flatten=True), new gradients"),
            ("limit: a copy of as many bytes", "limit: copy of as many bytes"),
        )
    ),
]


def _measured(file: str, configuration: str, dtype: str, by: str, column: str) -> Decimal:
    wanted = {"configuration": configuration, "dtype": dtype, "by": by}
    [row] = [row for row in read(RESULTS / f"{file}.csv") if wanted.items() <= row.items()]
    return Decimal(row[column]) / (10**6 if column == "peak_bytes" else 1)


@pytest.mark.parametrize(("page", "row", "figures"), QUOTED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_quoted_figure_is_the_measured_one(page, row, figures):
    line = next(line for line in (ROOT / page).read_text().splitlines() if line.startswith(f"| {row}"))
    cells = "|".join(line.replace(f"| {row}", "", 1).split("|")[1 if not row.endswith("|") else 0 :])
    quoted = re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.-])", cells)[: len(figures)]
    assert len(quoted) == len(figures)
    for text, figure in zip(quoted, figures, strict=True):
        measured = _measured(*figure)
        assert abs(Decimal(text) - measured) <= Decimal(5).scaleb(Decimal(text).as_tuple().exponent - 1), (text, figure)


def test_the_tables_of_a_page_are_made_of_the_measurements():
    page = _report.PAGE.read_text()
    for title, text in _report.texts(RESULTS).items():
        assert put_between(page, title, text) == page, title


def test_every_benchmark_that_was_measured_has_its_tables_on_the_page():
    marks = re.findall("<!-- figures: (.*?) -->", _report.PAGE.read_text())
    assert {path.stem for path in RESULTS.rglob("*.csv")} <= set(marks)
