"""Importing the package and asking the doctor, with torch_npu absent, without CANN, and with it."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys

import torch_aclnn_ops
from torch_aclnn_ops import _cpu_extension, _installation, _torch_npu, doctor, functional, ops

import pytest
import torch

from tests import _torchs as torchs
from tests._children import run_code

ROOT = pathlib.Path(__file__).parents[1]

# A fake torch_npu package that counts as installed; it raises as the real one does where it cannot be loaded.
_BROKEN_TORCH_NPU = 'raise ImportError("libhccl.so: cannot open shared object file")'

# Lets CANN's libraries be found.
_WITH_CANN = """
import ctypes
load = ctypes.CDLL
cann = ("libacl", "libascendcl", "libhccl", "libge_", "libgraph")
ctypes.CDLL = lambda name, *args, **options: None if str(name).startswith(cann) else load(name, *args, **options)
"""


# Lets torch_npu not be found, nor by torch.
_WITHOUT_TORCH_NPU = (
    "import os, sys; sys.modules['torch_npu'] = None; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'"
)


def _entry_point(path: pathlib.Path, package: str) -> None:
    """Register a package as a device backend that torch loads automatically."""
    metadata = path / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{package} = {package}:_autoload\n")


@pytest.fixture
def without_cann(tmp_path):
    """A path where torch_npu is installed and cannot be loaded."""
    (tmp_path / "torch_npu.py").write_text(_BROKEN_TORCH_NPU)
    _entry_point(tmp_path, "torch_npu")
    return tmp_path


def test_importing_torch_fails_if_torch_npu_has_no_cann(without_cann):
    # What the package has to work around; if this starts to pass, the work-around can go.
    assert run_code("import torch", without_cann).returncode != 0


def test_the_package_imports_if_torch_npu_has_no_cann(without_cann):
    result = run_code("import torch_aclnn_ops, torch; print(torch.ones(1) + 1)", without_cann)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("autoload", ["0", "1"])
@pytest.mark.exhaustive
def test_torch_npu_without_cann_is_hidden_from_other_packages(without_cann, autoload):
    # transformers, accelerate, peft and Lightning import torch_npu wherever it is found.
    code = (
        "import importlib.util, torch_aclnn_ops\n"
        "if importlib.util.find_spec('torch_npu') is not None: import torch_npu\n"
        "print(torch_aclnn_ops._torch_npu.is_installed(), torch_aclnn_ops._torch_npu.is_imported())"
    )
    result = run_code(code, without_cann, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert result.stdout == "True False\n", result.stderr


def test_the_import_leaves_the_environment_unchanged(without_cann):
    code = "import torch_aclnn_ops, os; print(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))"
    assert run_code(code, without_cann).stdout.strip() == "None"
    assert run_code(code, without_cann, TORCH_DEVICE_BACKEND_AUTOLOAD="1").stdout.strip() == "1"


def _diagnosis(path: pathlib.Path, before: str = "", **environment: str) -> dict[str, dict[str, str]]:
    """What the doctor finds, by name."""
    code = f"{before}\nfrom torch_aclnn_ops import doctor; doctor.main(['--json'])"
    result = run_code(code, path, **environment)
    assert result.returncode == 0, result.stderr
    return {row["what"]: row for row in json.loads(result.stdout)["findings"]}


def test_the_doctor_reports_that_cann_is_missing(without_cann):
    found = _diagnosis(without_cann)
    assert found["CANN"]["found"] == "not found"
    assert found["CANN"]["remedy"] == "for real NPUs: install CANN and source its set_env.sh"
    assert "torch_npu is installed, but CANN is not: libascendcl.so" in found["NPU"]["found"]


@pytest.mark.exhaustive
def test_the_doctor_has_no_remedies_for_npus_where_nothing_of_them_is_found(tmp_path):
    found = _diagnosis(tmp_path, _WITHOUT_TORCH_NPU)
    assert found["torch_npu"]["found"] == "not installed"
    assert found["NPU"]["found"] == "none: torch_npu is not installed"
    for what in ("torch_npu", "CANN", "NPU extension"):
        assert found[what]["remedy"] is None


@pytest.mark.exhaustive
def test_the_doctor_reports_how_to_install_torch_npu_where_something_of_an_npu_is_found(tmp_path):
    found = _diagnosis(tmp_path, _WITHOUT_TORCH_NPU, ASCEND_HOME_PATH="/opt/cann")
    remedy = _installation.how_to_install(torch.__version__)
    assert found["torch_npu"]["remedy"] == f"for NPUs, real or simulated: {remedy}"


@pytest.mark.exhaustive
def test_the_doctor_reports_a_torch_npu_of_another_version(without_cann):
    found = _diagnosis(without_cann)  # whose torch_npu is 1.0
    assert found["torch_npu"]["found"] == f"1.0, but torch is {torch.__version__}"
    assert found["torch_npu"]["remedy"] == _installation.how_to_install(torch.__version__)
    assert found["torch_npu"]["is_broken"]


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("2.9.1+cu128", "pip install torch_npu==2.9.1"),
        ("2.12.0", "pip install torch_npu==2.12.0.post3"),
        (
            "2.15.0+cpu",
            "pip install torch==2.14.0 torch_npu==2.14.0, because torch 2.15.0+cpu is newer than the newest with a"
            " tested torch_npu, 2.14.0; on a machine with an NPU, install the versions for its CANN, see"
            " docs/install.md",
        ),
        (
            "2.11.0",
            "pip install torch==2.14.0 torch_npu==2.14.0, because torch 2.11.0 has no tested torch_npu; these have one:"
            " 2.9.1, 2.12.0, 2.13.0, 2.14.0; on a machine with an NPU, install the versions for its CANN, see"
            " docs/install.md",
        ),
    ],
)
def test_the_doctors_remedy_is_a_torch_npu_that_exists_for_this_torch(version, remedy):
    assert _installation.how_to_install(version) == remedy


def test_the_page_of_versions_has_every_tested_pair():
    rows = re.findall(r"^\| (\d[\d.]*), \w+ build \| (\S+) \|", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
    assert dict(rows) == _installation.PAIRS
    oldest, newest = (".".join(version.split(".")[:2]) for version in (rows[-1][0], rows[0][0]))
    assert f"torch {oldest} to {newest}." in (ROOT / "docs/install.md").read_text()


@pytest.mark.exhaustive
def test_the_doctor_reports_that_cann_is_not_on_the_loaders_search_path(without_cann):
    found = _diagnosis(without_cann, ASCEND_HOME_PATH="/opt/cann")
    assert found["CANN"]["found"] == "/opt/cann, but not on the loader's search path"
    assert found["CANN"]["remedy"] == "source /opt/cann/set_env.sh"


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


@pytest.mark.exhaustive
def test_the_doctor_reports_that_torch_npu_finds_no_device(tmp_path):
    (tmp_path / "torch_npu.py").write_text(
        "import torch, types\ntorch.npu = types.SimpleNamespace(device_count=lambda: 0)\ndef _autoload(): pass"
    )
    _entry_point(tmp_path, "torch_npu")
    found = _diagnosis(tmp_path, f"{_WITH_CANN}\nimport torch_aclnn_ops; ctypes.CDLL = load")
    assert found["NPU"]["found"] == "none: torch_npu is imported, but it finds no device"
    assert found["NPU"]["remedy"] == "check npu-smi info"


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


def test_the_package_imports_without_torch_npu(tmp_path):
    result = run_code(f"{_WITHOUT_TORCH_NPU}\nimport torch_aclnn_ops, torch; print(torch.ones(1) + 1)", tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.exhaustive
def test_torch_npu_is_loaded_if_cann_is_found(tmp_path):
    # A torch_npu that loads, and CANN libraries that do: empty shared objects under CANN's names.
    (tmp_path / "torch_npu.py").write_text("def _autoload(): print('autoloaded')")
    _entry_point(tmp_path, "torch_npu")
    code = (
        f"{_WITH_CANN}\n"
        "import torch_aclnn_ops, sys; print('torch_npu' in sys.modules, torch_aclnn_ops._torch_npu.why_unavailable())"
    )
    result = run_code(code, tmp_path)
    assert result.stdout.split("\n")[:2] == ["autoloaded", "True None"], result.stderr


def test_torch_npu_is_not_loaded_if_autoload_is_disabled(tmp_path):
    (tmp_path / "torch_npu.py").write_text("print('imported')")
    (tmp_path / "libascendcl.so").touch()
    code = "import torch_aclnn_ops; print(torch_aclnn_ops._torch_npu.why_unavailable())"
    result = run_code(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", LD_LIBRARY_PATH=str(tmp_path))
    assert "imported" not in result.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables loading torch_npu" in result.stdout


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


@pytest.mark.parametrize("name", [name for name in functional.__all__ if hasattr(torchs.functional, name)])
def test_a_drop_in_has_torchs_arguments_and_defaults(name):
    import inspect

    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (functional, torchs.functional))
    assert [(p.name, p.kind, p.default) for p in mine.values()][: len(theirs)] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_a_tensor_subclass_behaves_as_with_torch():
    class Tagged(torch.Tensor):
        pass

    tagged = torch.rand(3).as_subclass(Tagged)
    assert type(functional.mse_loss(tagged, tagged)) is Tagged


def test_a_default_device_does_not_change_the_implementation(monkeypatch):
    # torch.set_default_device enables a TorchFunctionMode, which has_torch_function treats as an override.
    called = []
    from torch_aclnn_ops.functional import mse_loss

    module = sys.modules[mse_loss.__module__]
    original = module._mse_loss
    monkeypatch.setattr(module, "_mse_loss", lambda *args: called.append(1) or original(*args))
    with torch.device("cpu"):
        functional.mse_loss(torch.rand(3), torch.rand(3))
    assert called


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("transformers", "transformers"),
        pytest.param("lightning", "lightning.pytorch", marks=pytest.mark.exhaustive),
        pytest.param("trl", "trl", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_a_missing_integration_reports_what_to_install(module, needs, tmp_path):
    hidden = f"import sys; sys.modules[{needs!r}] = None\n"
    assert run_code(hidden + "import torch_aclnn_ops.integrations", tmp_path).returncode == 0
    result = run_code(hidden + f"import torch_aclnn_ops.integrations.{module}", tmp_path)
    assert re.search(rf"ImportError: torch_aclnn_ops.integrations.{module} needs .*: pip install ", result.stderr)


def test_the_package_imports_none_of_the_libraries_that_it_integrates(tmp_path):
    code = (
        "import torch_aclnn_ops, sys\n"
        "print({'transformers', 'accelerate', 'peft', 'lightning', 'trl'} & sys.modules.keys())"
    )
    assert run_code(code, tmp_path).stdout == "set()\n"
