"""The benchmarks run and write what they promise, and the documentation has what they last wrote."""

import re
import subprocess
import sys
from pathlib import Path

from torch_aclnn_ops import _cpu_extension

import pytest
import torch

from benchmarks import _report, _scale, call_path
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks._figures import put_between
from benchmarks._linear_cross_entropy_cases import LABELS, WITHOUT_KERNELS, Problem, make_call, why_absent
from benchmarks._results import MACHINE, MEASUREMENT, read

ROOT = Path(__file__).parents[1]
CASES = ["naive", "torch-512", "torch_aclnn_ops", WITHOUT_KERNELS, "limit"]
WITH_TARGETS_OF_THEIR_OWN = {"errors", "gallery", "soak"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    options = ["--quick", "--shape", "40x8x50", "--dtypes", "float32", "--ignored", "0.2", "--threads", "1"]
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", *options, "--cases", *CASES]
    subprocess.run([*command, "--output", str(folder)], check=True, cwd=ROOT, timeout=900)
    [path] = folder.glob("*/linear_cross_entropy.csv")
    return read(path)


@pytest.mark.exhaustive
def test_every_row_records_versions_and_date(rows):
    names = list(rows[0])
    assert names[: len(MEASUREMENT)] == MEASUREMENT and names[-len(MACHINE) :] == MACHINE
    for row in rows:
        assert not [name for name in ("operator", "by", "status", *MACHINE) if not row[name]]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", row["date"])


@pytest.mark.exhaustive
def test_linear_cross_entropy_measures_time_memory_and_errors_of_every_case(rows):
    measured = [row for row in rows if row["configuration"] == "40 x 8 x 50, 20% of the rows ignored"]
    installed = [LABELS[case] for case in CASES if why_absent(case) is None]
    assert [row["by"] for row in measured if row["status"] == "measured"] == installed
    assert float(measured[0]["ratio_of_minima"]) == float(measured[0]["ratio_of_medians"]) == 1
    for row in measured:
        assert float(row["median_s"]) >= float(row["minimum_s"]) > 0
        errors = [row[f"{name}_error"] for name in ("loss", "dx", "dw")]
        if row["by"] == LABELS["limit"]:
            assert errors == [""] * 3 and int(row["peak_bytes"]) == (40 + 50) * 8 * 4
        else:
            assert all(float(error) < 1e-5 for error in errors)


@pytest.mark.exhaustive
def test_memory_alone_has_no_times_and_each_result_is_printed_as_it_is_known():
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", "--quick", "--memory", "--dtypes", "float32"]
    result = subprocess.run(command, check=True, cwd=ROOT, timeout=900, capture_output=True, text=True)
    assert "peak MB" in result.stdout and "median" not in result.stdout
    assert [line for line in result.stderr.splitlines() if ", peak MB" in line and "by torch_aclnn_ops" in line]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["collectives", "dispatch", "losses"])
def test_a_benchmark_prints_each_result_before_the_table(name, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--output", str(tmp_path)]
    result = subprocess.run(command, check=True, cwd=ROOT, timeout=900, capture_output=True, text=True)
    [path] = tmp_path.glob(f"*/{name}.csv")
    reported = [line for line in result.stderr.splitlines() if line.startswith("operator ") and "median ms" in line]
    assert len(reported) == len(read(path))


@pytest.mark.exhaustive
def test_linear_cross_entropy_is_measured_for_several_numbers_of_rows_and_classes(rows):
    for variable in ("rows", "classes"):
        sizes = [int(row["size"]) for row in rows if row["variable"] == variable and row["by"] == "torch_aclnn_ops"]
        assert sizes == sorted(set(sizes)) and len(sizes) > 1


@pytest.mark.skipif(_cpu_extension.why_unavailable() is not None, reason="the CPU kernels are not built")
@pytest.mark.parametrize(("case", "launched"), [("torch_aclnn_ops", True), (WITHOUT_KERNELS, False)])
def test_the_case_without_compiled_kernels_launches_none(case, launched):
    call = make_call(case, Problem((40, 8, 50), "bfloat16", 0.0).tensors())
    with torch.profiler.profile() as profile:
        call()
    assert any(event.key.startswith("torch_aclnn_ops::") for event in profile.key_averages()) == launched


@pytest.mark.exhaustive
def test_peers_that_cannot_be_measured_are_listed_with_the_reason(rows):
    absent = {row["by"]: row["status"] for row in rows if row["status"].startswith("absent: ")}
    assert "triton" in absent["Liger-Kernel"]


def test_one_command_runs_a_benchmark_by_its_name(tmp_path):
    assert main(["call_path", "--output", str(tmp_path)]) == 0
    assert [path.stem for path in tmp_path.glob("*/*.csv")] == ["call_path"]


@pytest.mark.exhaustive
def test_a_failing_benchmark_is_reported_and_the_others_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(BENCHMARKS, "dispatch", ("--no-such-option",))
    assert main(["dispatch", "call_path", "--output", str(tmp_path)]) == 1
    assert "dispatch: ended with status 2" in capfd.readouterr().err
    assert [path.stem for path in tmp_path.glob("*/*.csv")] == ["call_path"]


def test_an_unknown_benchmark_raises_with_the_list_of_names(capsys):
    with pytest.raises(SystemExit):
        main(["loses"])
    printed = capsys.readouterr().err
    assert all(name in printed for name in ("loses", *BENCHMARKS))


def test_every_benchmark_has_a_make_target():
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")}
    assert modules - WITH_TARGETS_OF_THEIR_OWN == set(BENCHMARKS) - {"call_overhead_npu"}


def _between(page, title):
    return page.split(f"<!-- figures: {title} -->\n\n", 1)[1].split("\n\n<!-- end of figures -->", 1)[0]


@pytest.mark.parametrize("title", _scale.texts())
def test_the_tables_of_scale_match_the_plan(title):
    assert _between(_scale.PAGE.read_text(), title) == _scale.texts()[title], "run python -m benchmarks --figures"


def test_growth_is_the_slope_in_log_log_scale():
    common = {"operator": "mse_loss", "configuration": "", "device": "cpu", "dtype": "float32", "variable": "elements"}
    rows = [
        {
            **common,
            "by": "torch",
            "size": str(size),
            "minimum_s": str(3e-9 * size**1.5),
            "peak_bytes": str(size * 2**20),
        }
        for size in (1, 2, 4, 8)
    ]
    [row] = _report.growths(rows)
    assert (row["time grows with the power"], row["memory"]) == ("1.50", "1.00")
    assert row["sizes"] == "1 to 8 elements"


def test_figures_replace_the_old_ones_and_handwritten_text_is_kept():
    page = put_between("# Page\n\nBy hand.\n", "speed", "old \\1")
    assert page == "# Page\n\nBy hand.\n\n## speed\n\n<!-- figures: speed -->\n\nold \\1\n\n<!-- end of figures -->\n"
    assert put_between(page, "speed", "new") == page.replace("old \\1", "new")


@pytest.mark.parametrize("name", call_path.cases())
def test_a_call_goes_through_few_functions_and_files(name):
    calls = call_path.calls_of(call_path.cases()[name])
    assert 0 < len(calls) <= 90
    assert len({file for file, _ in calls}) <= 13
