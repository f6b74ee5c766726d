"""The figures that pages quote are those that were measured: the files in benchmarks/results."""

import re
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from itertools import product
from pathlib import Path

import pytest

from benchmarks import _report
from benchmarks._figures import put_between
from benchmarks._results import RESULTS, read

ROOT = Path(__file__).parents[1]
AVX512, AVX2 = "amd-epyc-avx512-bf16-2-cores", "amd-epyc-avx2-2-cores"


@dataclass(frozen=True)
class Quoting:
    """A table of a page that quotes figures: of each dtype, the columns of the cases that a row names.

    Attributes:
        rows: How a row begins, and the cases in the order of its figures.
    """

    page: str
    file: str
    configuration: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    dtypes: tuple[str, ...] = ("float32",)

    def figures(self, row: str) -> list[Decimal]:
        """Return the measured figures of a row, bytes as megabytes."""
        measured = read(RESULTS / f"{self.file}.csv")
        found = []
        for by, dtype in product(self.rows[row], self.dtypes):
            wanted = {"configuration": self.configuration, "dtype": dtype, "by": by}
            [case] = [case for case in measured if wanted.items() <= case.items()]
            found += [Decimal(case[column]) / (10**6 if column == "peak_bytes" else 1) for column in self.columns]
        return found


_NAIVE, _OURS = "cross_entropy(linear(...))", "torch_aclnn_ops"
_LIMIT = "limit: the matrix products alone"
_RATIOS = ("ratio_of_medians", "ratio_of_minima")
_HEAD = (f"{AVX512}/linear_cross_entropy", "2048 x 512 x 32000")
_STEP = (f"{AVX512}/ema_adam", "200 tensors of 50,000 elements", ("ratio_of_medians",))
_ADAM, _FLAT = "FusedEmaAdam", "FusedEmaAdam(flatten=True)"

QUOTING = [
    Quoting("README.md", *_HEAD, ("peak_bytes",), {"peak memory of a head's loss and gradients": (_NAIVE, _OURS)}),
    Quoting(
        "README.md",
        *_STEP,
        {"time of a step of AdamW and averages": ("AdamW(fused=True), swa_utils EMA", _ADAM)},
    ),
    Quoting(
        "docs/linear_cross_entropy.md",
        *_HEAD,
        (*_RATIOS, "peak_bytes"),
        {
            "`cross_entropy(linear(...))`": (_NAIVE,),
            "`torch.compile` of it": (f"torch.compile of {_NAIVE}",),
            "torch, `options=None`": ("torch, options=None",),
            "torch, `LinearCrossEntropyOptions()`": ("torch, LinearCrossEntropyOptions()",),
            "torch, `batch_chunk_size=512`": ("torch, batch_chunk_size=512",),
            "torch_aclnn_ops |": (_OURS,),
            "limit: the matrix products alone": (_LIMIT,),
        },
        ("float32", "bfloat16"),
    ),
    Quoting(
        "docs/losses_on_a_head.md",
        f"{AVX2}/linear_kl_div",
        "1024 x 256 x 32000",
        ("median_s", "minimum_s", *_RATIOS, "peak_bytes"),
        {
            "`kl_div` of two `log_softmax(linear(...))`": ("kl_div of two log_softmax(linear(...))",),
            "Liger's implementation": ("Liger's formula, chunks of 1024 rows",),
            "`linear_kl_div` |": (_OURS,),
            "`linear_kl_div`, reverse KL": (f"{_OURS}, reverse KL",),
            "`linear_kl_div`, Jensen-Shannon": (f"{_OURS}, Jensen-Shannon",),
            "the four matrix products alone": (_LIMIT,),
        },
    ),
    Quoting(
        "docs/optimizer.md",
        *_STEP,
        {
            "torch, `AdamW(foreach=True)`": ("AdamW(foreach=True), swa_utils EMA",),
            "`FusedEmaAdam` |": (_ADAM,),
            "`FusedEmaAdam(flatten=True)` |": (_FLAT,),
            "the same with new gradients": (f"{_FLAT}, new gradients",),
            "limit: a copy of as many bytes": ("limit: copy of as many bytes",),
        },
    ),
]


@pytest.mark.parametrize(
    ("table", "row"),
    [pytest.param(table, row, id=f"{table.page}-{row}") for table in QUOTING for row in table.rows],
)
def test_a_quoted_figure_is_the_measured_one(table, row):
    line = next(line for line in (ROOT / table.page).read_text().splitlines() if line.startswith(f"| {row}"))
    _, _, cells = line.removeprefix("| ").partition("|")
    figures = table.figures(row)
    quoted = re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.-])", cells)[: len(figures)]
    # A figure is rounded to the digits that are quoted.
    assert [Decimal(text) for text in quoted] == [
        figure.quantize(Decimal(text), ROUND_HALF_UP) for text, figure in zip(quoted, figures, strict=True)
    ]


def test_the_tables_of_a_page_are_made_of_the_measurements():
    page = _report.PAGE.read_text()
    for title, text in _report.texts(RESULTS).items():
        assert put_between(page, title, text) == page, title


def test_every_benchmark_that_was_measured_has_its_tables_on_the_page():
    marks = re.findall("<!-- figures: (.*?) -->", _report.PAGE.read_text())
    assert {path.stem for path in RESULTS.rglob("*.csv")} <= set(marks)
