"""The doctor's report and its checks: everything is right on this CPU, and faults are found."""

import functools
import importlib.metadata
import importlib.util
import json

from torch_aclnn_ops import _cpu_extension, _installation, _torch_npu, doctor, functional, ops, optim
from torch_aclnn_ops._checks import DROP_INS

import pytest
import torch


def test_everything_is_right_on_the_cpu_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert doctor.main(["--check", "--device", "cpu"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert doctor.main(["--check", "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert last == f"0 of {len(report['checks'])} checks are wrong." and len(table) == len(report["checks"])
    assert {check["is_right"] for check in report["checks"]} == {True}
    assert report["device"] == "cpu" and report["findings"] and report["operators"]
    assert not [*tmp_path.iterdir()]


def test_every_drop_in_is_checked_in_every_dtype():
    names = [outcome.name for outcome in doctor.check("cpu")]
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert {f"{name}, {dtype}" for name in DROP_INS for dtype in dtypes} <= set(names)


def _wrong(function):
    @functools.wraps(function)
    def wrong(*args, **kwargs):
        result = function(*args, **kwargs)
        return result * 1.1 if isinstance(result, torch.Tensor) else result

    return wrong


FAULTS = {
    "a loss": (functional, "mse_loss", _wrong(functional.mse_loss), "mse_loss"),
    "a step": (optim.FusedEmaAdam, "step", lambda *_: None, "steps"),
    "an exception": (functional, "embedding", lambda *_: 1 / 0, "embedding"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_the_others_are_still_checked(fault, monkeypatch, capsys):
    module, name, wrong, what = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    assert doctor.main(["--check", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert all(("WRONG" in line) == (what in line) for line in lines)


def test_a_machine_without_an_npu_is_told_what_to_run(capsys):
    assert doctor.main(["--check"]) == 2
    assert "`python -m host_npu -m torch_aclnn_ops.doctor --check`" in capsys.readouterr().err


def test_the_doctor_reports_what_is_not_installed(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    remedy = "to simulate NPUs: pip install ./host-npu, after torch_npu"
    assert _installation._host_npu() == doctor.Finding("host NPU", "not installed", remedy)
    assert _installation._other_libraries() == doctor.Finding("other libraries", "none")


def test_the_doctor_reports_relevant_settings_and_libraries(monkeypatch):
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    monkeypatch.setenv("TORCH_ACLNN_CHECK_VALUES", "1")
    monkeypatch.setenv("MY_TOKEN", "secret")
    found = {row.what: row.found for row in doctor.findings()}
    assert {"TASK_QUEUE_ENABLE=2", "TORCH_ACLNN_CHECK_VALUES=1"} <= set(found["settings"].split(", "))
    assert "secret" not in str(found)
    versions = dict(one.split() for one in found["other libraries"].split(", "))
    expected = [name for name in ("numpy", "transformers", "trl") if importlib.util.find_spec(name)]
    assert versions.items() >= {name: importlib.metadata.version(name) for name in expected}.items()


def test_the_doctor_reports_the_cpu_kernels_and_how_to_install_them(monkeypatch):
    monkeypatch.setattr(_cpu_extension, "why_unavailable", lambda: "it was not built")
    cure = "for speed: install torch_aclnn_ops again with pip's --no-build-isolation, in a checkout with --editable too"
    assert doctor.findings()[-1] == doctor.Finding("CPU kernels", "not loaded: it was not built", cure)
    monkeypatch.setattr(_cpu_extension, "why_unavailable", lambda: None)
    monkeypatch.setattr(_cpu_extension, "why_no_bfloat16_products", lambda: "the CPU has no fast bfloat16 instructions")
    reason = "bfloat16 products in float32, because the CPU has no fast bfloat16 instructions"
    assert doctor.findings()[-1] == doctor.Finding("CPU kernels", reason)


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_doctors_exit_status_is_1_if_something_installed_cannot_be_used(is_broken, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding("CANN", "/opt/cann", None, is_broken)])
    assert doctor.main([]) == is_broken
    assert "\n\nCANN\n    /opt/cann\n" in capsys.readouterr().out


@pytest.mark.parametrize("has_cann", [False, True])
def test_a_cuda_build_of_torch_beside_torch_npu_is_broken_only_where_there_is_a_cann(has_cann, monkeypatch):
    monkeypatch.setattr(_torch_npu, "is_installed", lambda: True)
    monkeypatch.setattr(_torch_npu, "conflict", lambda: "the installed torch is a CUDA build. Install the other")
    monkeypatch.setattr(_torch_npu, "finds_cann", lambda: has_cann)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: torch.__version__)
    assert _installation._installed_torch_npu().is_broken == has_cann


@pytest.mark.parametrize(
    ("has_kernels", "has_npu", "is_simulated", "has_cann", "broken", "verdict"),
    [
        (True, False, False, False, [], "CPU: ready, with compiled CPU kernels\nNPU: none"),
        (False, True, False, True, [], "CPU: ready, without compiled CPU kernels\nNPU: ready"),
        (True, True, True, False, [], "CPU: ready, with compiled CPU kernels\nNPU: ready, simulated"),
        (True, False, False, True, [], "CPU: ready, with compiled CPU kernels\nNPU: not ready: a reason"),
        (True, False, False, True, ["X"], "CPU: ready, with compiled CPU kernels\nNPU: not ready, see the remedy of X"),
    ],
)
def test_a_report_begins_with_what_can_be_used(
    has_kernels, has_npu, is_simulated, has_cann, broken, verdict, monkeypatch
):
    monkeypatch.setattr(_cpu_extension, "why_unavailable", lambda: None if has_kernels else "it was not built")
    monkeypatch.setattr(_torch_npu, "is_imported", lambda: has_npu)
    monkeypatch.setattr(_torch_npu, "why_unavailable", lambda: "a reason")
    monkeypatch.setattr(doctor, "is_simulated", lambda: is_simulated)
    monkeypatch.setattr(doctor, "has_npu_or_cann", lambda: has_cann)
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding(what, "", is_broken=True) for what in broken])
    start, *_, paths = doctor.describe().split("\n\n")
    assert start == verdict and ("NPU:" in paths) == has_npu


def test_a_report_shows_all_findings_and_the_implementation_of_every_operator():
    _, found, used = doctor.describe().split("\n\n")
    words = " ".join(found.split())
    assert [line for line in found.splitlines() if not line.startswith(" ")] == [row.what for row in doctor.findings()]
    assert all(row.found in words and (row.remedy or "") in words for row in doctor.findings())
    paths = dict(zip(*[iter(line.strip() for line in used.splitlines() if "NPU:" not in line)] * 2, strict=True))
    assert list(paths) == ops.__all__ and paths["mse_loss_backward"] == "CPU: native PyTorch kernel"
    assert paths["fused_linear_online_max_sum"] == "CPU: PyTorch fallback"
