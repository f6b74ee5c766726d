"""The doctor's report and its checks: everything is right on this CPU, and what is wrong is found."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys

import torch_aclnn_ops
from torch_aclnn_ops import _cpu_extension, _installation, _torch_npu, doctor, functional, ops, optim
from torch_aclnn_ops._drop_ins import DROP_INS

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


def _no_step(self, closure=None):
    pass


FAULTS = {
    "a loss": (functional, "mse_loss", _wrong(functional.mse_loss), "mse_loss"),
    "a gradient of a shard": (
        ops,
        "fused_linear_cross_entropy_loss_grad",
        lambda *args: tuple(2 * one for one in ops.fused_linear_cross_entropy_loss_grad.run(*args)),
        "raw operators",
    ),
    "a step": (optim.FusedEmaAdam, "step", _no_step, "steps"),
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


@pytest.mark.parametrize(
    ("folder", "shown"),
    [
        ("/home/alice/Ascend", "~/Ascend"),
        ("/data/alice/cann", "/data/$USER/cann"),
        ("/home/bob/cann", "/home/.../cann"),
        ("/opt/malice/cann", "/opt/malice/cann"),
    ],
)
def test_a_report_of_the_doctor_contains_no_home_directory_or_user_name(folder, shown, monkeypatch):
    of_alice = {"HOME": "/home/alice", "USER": "alice", "LOGNAME": "alice", "ASCEND_HOME_PATH": folder}
    for name, value in of_alice.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_torch_npu, "finds_cann", lambda: False)
    [cann] = [found for found in doctor.findings() if found.what == "CANN"]
    assert cann.found == f"{shown}, but not on the loader's search path"
    assert cann.remedy == f"source {shown}/set_env.sh"


def test_the_doctor_reports_how_to_install_the_host_npu(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    remedy = "to simulate NPUs: pip install ./host-npu, after torch_npu"
    assert _installation._host_npu() == doctor.Finding("host NPU", "not installed", remedy)


def test_the_doctor_reports_that_the_package_is_a_checkout():
    assert doctor.findings()[0].found == f"{torch_aclnn_ops.__version__}, from a checkout"


def test_a_report_of_the_doctor_contains_no_host_name(capsys, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "the-machine")
    monkeypatch.setenv("HOSTNAME", "the-machine")
    doctor.main(["--json"])
    assert "the-machine" not in capsys.readouterr().out


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
    assert doctor.findings()[-1] == doctor.Finding(
        "CPU kernels",
        "not loaded: it was not built",
        "for speed: install torch_aclnn_ops again with pip's --no-build-isolation, in a checkout with --editable too",
    )
    monkeypatch.setattr(_cpu_extension, "why_unavailable", lambda: None)
    monkeypatch.setattr(_cpu_extension, "why_no_bfloat16_products", lambda: "the CPU has no bfloat16 instructions")
    assert doctor.findings()[-1] == doctor.Finding(
        "CPU kernels", "bfloat16 products in float32, because the CPU has no bfloat16 instructions"
    )


@pytest.mark.parametrize("columns", ["10", "60", "80", "300"])
def test_a_report_of_the_doctor_fits_the_terminal_and_shows_all_findings(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = doctor.describe().split("\n\n")[1].splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [found.what for found in doctor.findings()]
    words = " ".join(lines).split()
    for found in doctor.findings():
        assert " ".join(found.found.split()) in " ".join(words) and (found.remedy or "") in " ".join(words)
    width = min(max(int(columns), 40), 100)
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)


def test_the_doctor_ends_quietly_where_nobody_reads_on():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torch_aclnn_ops.doctor"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_doctors_exit_status_is_1_if_something_installed_cannot_be_used(is_broken, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding("CANN", "/opt/cann", None, is_broken)])
    assert doctor.main([]) == is_broken
    assert "\n\nCANN\n    /opt/cann\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("why_no_kernels", "has_npu", "is_simulated", "broken", "verdict"),
    [
        (None, False, False, [], "CPU: ready, with compiled CPU kernels\nNPU: none"),
        (
            "it was not built",
            False,
            False,
            [],
            "CPU: ready, without compiled CPU kernels\n"
            "    to compile them, in a checkout: pip install --no-build-isolation --editable .\nNPU: none",
        ),
        (None, True, False, [], "CPU: ready, with compiled CPU kernels\nNPU: ready"),
        (None, True, True, [], "CPU: ready, with compiled CPU kernels\nNPU: ready, simulated"),
        (None, False, False, ["CANN"], "CPU: ready, with compiled CPU kernels\nNPU: not ready, see the remedy of CANN"),
    ],
)
def test_the_doctor_begins_with_what_can_be_used(why_no_kernels, has_npu, is_simulated, broken, verdict, monkeypatch):
    monkeypatch.setattr(_cpu_extension, "why_unavailable", lambda: why_no_kernels)
    monkeypatch.setattr(_torch_npu, "is_imported", lambda: has_npu)
    monkeypatch.setattr(doctor, "is_simulated", lambda: is_simulated)
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding(what, "", is_broken=True) for what in broken])
    assert doctor.describe().split("\n\n")[0] == verdict


def test_the_doctor_begins_with_why_the_npu_of_a_machine_with_cann_is_not_ready(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(_torch_npu, "is_imported", lambda: False)
    monkeypatch.setattr(_torch_npu, "finds_cann", lambda: True)
    monkeypatch.setattr(_torch_npu, "why_unavailable", lambda: "torch was imported without torch_npu " + "before " * 9)
    monkeypatch.setattr(doctor, "findings", list)
    verdict = doctor.describe().split("\n\n")[0].splitlines()[1:]
    assert verdict[0].startswith("NPU: not ready: torch was imported without torch_npu before")
    assert len(verdict) == 2 and all(len(line) <= 80 for line in verdict)


def test_the_doctor_speaks_of_npus_in_the_list_of_operators_only_if_there_is_one(monkeypatch):
    monkeypatch.setattr(_torch_npu, "is_imported", lambda: False)
    assert "NPU:" not in doctor.describe().split("\n\n")[2]
    monkeypatch.setattr(_torch_npu, "is_imported", lambda: True)
    monkeypatch.setattr(doctor, "findings", list)
    assert "NPU:" in doctor.describe().split("\n\n")[2]


def test_the_doctor_says_how_to_check_a_simulated_npu(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "python -m host_npu -m torch_aclnn_ops.doctor" in said and "exit status is 1" in said


def test_the_doctor_reports_the_implementation_of_every_operator():
    sections = re.split(r"^(?=\S)", doctor.describe().split("\n\n")[2], flags=re.MULTILINE)[1:]
    paths = {section.split()[0]: " ".join(section.split()[1:]) for section in sections}
    composed = ["functional.linear_cross_entropy", "optim.FusedEmaAdam"]
    assert sorted(paths) == sorted([*ops.__all__, *composed])
    assert "native PyTorch kernel" in paths["mse_loss_backward"]
    assert "native PyTorch kernels for float32 and float64, else PyTorch fallback" in paths["optim.FusedEmaAdam"]
    has_kernels = _cpu_extension.why_unavailable() is None
    assert (
        "compiled CPU kernels, PyTorch fallback in float64" in paths["functional.linear_cross_entropy"]
    ) == has_kernels
    assert "PyTorch fallback" in paths["fused_linear_online_max_sum"]
