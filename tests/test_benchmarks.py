"""The benchmarks run, and write what they promise."""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import call_path
from benchmarks._linear_cross_entropy_cases import LABELS, is_installed

_CASES = ["naive", "torch-256", "ours", "limit"]
_INSTALLED = [case for case in _CASES if is_installed(case)]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("linear_cross_entropy")
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", "--shapes", "40x8x50", "--dtypes", "float32"]
    command += ["--passes", "forward+backward", "--ignored", "0.2", "--rounds", "1", "--peers", *_CASES]
    subprocess.run([*command, "--output", str(folder)], check=True, cwd=Path(__file__).parents[1], timeout=300)
    return folder


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_linear_cross_entropy_measures_every_case_in_its_own_process(output):
    rows = _rows(output / "results.csv")
    assert {row["case"]: row["status"] for row in rows} == {
        case: "measured" if case in _INSTALLED else "not installed" for case in _CASES
    }
    for row in rows:
        if row["case"] not in _INSTALLED:
            continue
        assert float(row["median_s"]) >= float(row["minimum_s"]) > 0
        errors = [row[name] for name in ("loss_error", "dx_error", "dw_error")]
        if row["case"] == "limit":
            assert errors == [""] * 3
        else:
            assert all(float(error) < 1e-5 for error in errors)


def test_linear_cross_entropy_compares_with_the_matrix_products_in_one_process(output):
    rows = _rows(output / "interleaved.csv")
    assert [row["case"] for row in rows] == _CASES
    assert [row["case"] for row in rows if row["median_ratio"]] == _INSTALLED
    assert float(rows[-1]["median_ratio"]) == float(rows[-1]["minimum_ratio"]) == 1


@pytest.mark.parametrize("name", ["results", "interleaved"])
def test_linear_cross_entropy_writes_tables(output, name):
    text = (output / f"{name}.md").read_text()
    assert "### 40 x 8 x 50, float32, forward+backward, 20% of the rows ignored" in text
    assert all(f"\n| {label} " in text for label in map(LABELS.get, _INSTALLED))


def test_linear_cross_entropy_draws_where_matplotlib_is_installed(output):
    plotted = (output / "memory_and_time.png").exists()
    assert plotted == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.parametrize("name", call_path.cases())
def test_a_call_goes_through_few_functions_and_files(name):
    calls = call_path.calls_of(call_path.cases()[name])
    assert 0 < len(calls) <= 90
    assert len({file for file, _ in calls}) <= 10
