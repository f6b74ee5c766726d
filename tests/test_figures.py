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
from tests._pages import name_of, without_code

ROOT = Path(__file__).parents[1]
AVX512, AVX2 = "amd-epyc-avx512-bf16-2-cores", "amd-epyc-avx2-2-cores"


@dataclass(frozen=True)
class Quoting:
    """A table of a page that quotes figures.

    Attributes:
        page: The page.
        file: The CSV file that the figures are from.
        rows: How a row begins, and the cases in the order of its figures.
        figures: For each case, in the order of its figures: what selects a row of the file, and the column.
    """

    page: str
    file: str
    rows: dict[str, tuple[str, ...]]
    figures: tuple[tuple[dict[str, str], str], ...]

    def measured(self, row: str) -> list[Decimal]:
        """Return the measured figures of a row, bytes as megabytes; what was not measured is left out."""
        lines = read(RESULTS / f"{self.file}.csv")
        found = []
        for by, (selection, column) in product(self.rows[row], self.figures):
            wanted = {**selection, "by": by}
            [case] = [case for case in lines if wanted.items() <= case.items()]
            if case[column]:
                found.append(Decimal(case[column]) / (10**6 if column == "peak_bytes" else 1))
        return found


def _figures(*columns, **selection):
    return tuple(({"dtype": "float32", **selection}, column) for column in columns)


_NAIVE, _OURS = "cross_entropy(linear(...))", "torch_aclnn_ops"
_TORCH_CHUNKED, _LIMIT = "torch, LinearCrossEntropyOptions()", "limit: the matrix products alone"
_RATIOS = ("ratio_of_medians", "ratio_of_minima")
_HEAD, _SHAPE = f"{AVX512}/linear_cross_entropy", "2048 x 512 x 32000"
_STEP, _MODEL = f"{AVX512}/ema_adam", "200 tensors of 50,000 elements"
_ADAM, _FLAT = "FusedEmaAdam", "FusedEmaAdam(flatten=True)"

QUOTING = [
    Quoting(
        "README.md",
        _HEAD,
        {"peak memory of a head's loss and gradients": (_NAIVE, _OURS)},
        _figures("peak_bytes", configuration=_SHAPE),
    ),
    Quoting(
        "README.md",
        _HEAD,
        {"error of the bfloat16 loss": (_TORCH_CHUNKED, _OURS)},
        _figures("loss_error", configuration=_SHAPE, dtype="bfloat16"),
    ),
    Quoting(
        "README.md",
        _STEP,
        {"time of a step of AdamW and EMA": ("AdamW(fused=True), swa_utils EMA", _ADAM)},
        _figures("ratio_of_medians", configuration=_MODEL),
    ),
    Quoting(
        "docs/linear_cross_entropy.md",
        _HEAD,
        {
            "`cross_entropy(linear(...))`": (_NAIVE,),
            "`torch.compile` of it": (f"torch.compile of {_NAIVE}",),
            "torch, `options=None`": ("torch, options=None",),
            "torch, `LinearCrossEntropyOptions()`": (_TORCH_CHUNKED,),
            "torch, `batch_chunk_size=512`": ("torch, batch_chunk_size=512",),
            "torch_aclnn_ops |": (_OURS,),
            "torch_aclnn_ops, without compiled kernels": (f"{_OURS}, without compiled kernels",),
            "limit: the matrix products alone": (_LIMIT,),
        },
        (
            *_figures(*_RATIOS, "peak_bytes", configuration=_SHAPE),
            *_figures(*_RATIOS, "peak_bytes", "loss_error", configuration=_SHAPE, dtype="bfloat16"),
        ),
    ),
    Quoting(
        "docs/losses_on_a_head.md",
        f"{AVX2}/linear_kl_div",
        {
            "`kl_div` of two `log_softmax(linear(...))`": ("kl_div of two log_softmax(linear(...))",),
            "Liger's implementation": ("Liger's formula, chunks of 1024 rows",),
            "`linear_kl_div` |": (_OURS,),
            "`linear_kl_div`, reverse KL": (f"{_OURS}, reverse KL",),
            "`linear_kl_div`, Jensen-Shannon": (f"{_OURS}, Jensen-Shannon",),
            "the four matrix products alone": (_LIMIT,),
        },
        _figures("median_s", "minimum_s", *_RATIOS, "peak_bytes", configuration="1024 x 256 x 32000"),
    ),
    Quoting(
        "docs/optimizer.md",
        _STEP,
        {
            "torch, `AdamW(fused=True)`": ("AdamW(fused=True), swa_utils EMA",),
            "torch, `AdamW(foreach=True)`": ("AdamW(foreach=True), swa_utils EMA",),
            "`FusedEmaAdam` |": (_ADAM,),
            "`FusedEmaAdam(flatten=True)` |": (_FLAT,),
            "the same with new gradients": (f"{_FLAT}, new gradients",),
            "for comparison: a copy of as many bytes": ("limit: copy of as many bytes",),
        },
        (
            *_figures("ratio_of_medians", configuration=_MODEL),
            *_figures("ratio_of_medians", configuration="each, 20 tensors", size="1048576"),
            *_figures("ratio_of_medians", configuration="of 4096 elements each", size="2048"),
            *_figures("ratio_of_medians", configuration="of 4096 elements each", size="32"),
        ),
    ),
]


@pytest.mark.parametrize(
    ("table", "row"),
    [pytest.param(table, row, id=f"{table.page}-{row}") for table in QUOTING for row in table.rows],
)
def test_a_quoted_figure_is_the_measured_one(table, row):
    line = next(line for line in (ROOT / table.page).read_text().splitlines() if line.startswith(f"| {row}"))
    _, _, cells = line.removeprefix("| ").partition("|")
    figures = table.measured(row)
    quoted = re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?:e-\d+)?(?![\w.-])", cells)[: len(figures)]
    # A figure is rounded to the digits that are quoted.
    assert [Decimal(text) for text in quoted] == [
        figure.quantize(Decimal(text), ROUND_HALF_UP) for text, figure in zip(quoted, figures, strict=True)
    ]


def test_no_page_quotes_times_or_memory_that_no_test_compares():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        generated = re.compile("<!-- figures: .*?<!-- end of figures -->", re.DOTALL)
        text = generated.sub("", without_code(page))
        quoted = [f"| {row}" for table in QUOTING if table.page == name_of(page) for row in table.rows]
        lines = [line for line in text.splitlines() if not line.startswith(tuple(quoted))]
        assert not [line for line in lines if re.search(r"\d (?:MB|ms|tokens/s|of torch's time)\b", line)], page


def test_the_tables_of_a_page_are_made_of_the_measurements():
    page = _report.PAGE.read_text()
    for title, text in _report.texts(RESULTS).items():
        assert put_between(page, title, text) == page, title


def test_every_benchmark_that_was_measured_has_its_tables_on_the_page():
    marks = re.findall("<!-- figures: (.*?) -->", _report.PAGE.read_text())
    assert {path.stem for path in RESULTS.rglob("*.csv")} <= set(marks)
