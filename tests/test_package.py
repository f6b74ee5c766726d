"""Importing the package, and the doctor's findings, with torch_npu absent, without CANN, and with it."""

import json
import pathlib
import re
import sys
from functools import cache

from torch_aclnn_ops import _installation, functional

import pytest
import torch

from tests import _torchs as torchs
from tests._children import run_code

ROOT = pathlib.Path(__file__).parents[1]

# Raises like the real torch_npu when it cannot be loaded.
_BROKEN = 'raise ImportError("libhccl.so: cannot open shared object file")'
_LOADABLE = """
import torch, types
torch.npu = types.SimpleNamespace(device_count=lambda: 0)
print("imported")
def _autoload(): print("autoloaded")
"""
# Makes CANN's libraries loadable.
_WITH_CANN = """
import ctypes
load = ctypes.CDLL
cann = ("libacl", "libascendcl", "libhccl", "libge_", "libgraph")
ctypes.CDLL = lambda name, *args, **options: None if str(name).startswith(cann) else load(name, *args, **options)
"""
# Hides torch_npu, also from torch.
_NOT_INSTALLED = "import os, sys; sys.modules['torch_npu'] = None; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'"
# The source of a torch_npu 1.0, code that runs before the import, and settings.
INSTALLATIONS = {
    "no CANN": (_BROKEN, "", {}),
    "no CANN, not loaded by torch": (_BROKEN, "", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    "CANN not sourced": (_BROKEN, "", {"ASCEND_HOME_PATH": "/opt/cann"}),
    "no torch_npu": (None, _NOT_INSTALLED, {}),
    "CANN without a device": (_LOADABLE, _WITH_CANN, {}),
    "disabled": (_LOADABLE, "", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_LIBRARY_PATH": "{folder}"}),
}
_DEFAULT = ("no CANN", "no torch_npu", "disabled")
# Reports what a program finds.
_PROGRAM = """
import contextlib, importlib.util, io, json, os, sys
autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
import torch_aclnn_ops, torch
facts = {
    "sum": (torch.ones(1) + 1).item(),
    "integrated": sorted({"transformers", "accelerate", "peft", "lightning", "trl"} & sys.modules.keys()),
    "environment is unchanged": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == autoload,
    "is installed": torch_aclnn_ops._torch_npu.is_installed(),
    "is imported": torch_aclnn_ops._torch_npu.is_imported(),
    "others find it": importlib.util.find_spec("torch_npu") is not None,
    "why unavailable": torch_aclnn_ops._torch_npu.why_unavailable(),
}
if "load" in globals():
    ctypes.CDLL = load
from torch_aclnn_ops import doctor
with contextlib.redirect_stdout(io.StringIO()) as report:
    doctor.main(["--json"])
print(json.dumps(facts | {row["what"]: row for row in json.loads(report.getvalue())["findings"]}))
"""


def _install(folder: pathlib.Path, source: str) -> None:
    """Install a torch_npu as a device backend that torch loads automatically."""
    (folder / "torch_npu.py").write_text(source)
    metadata = folder / "torch_npu-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a function that returns a program's report in an installation, and its earlier output."""

    @cache
    def of(name):
        source, before, settings = INSTALLATIONS[name]
        folder = tmp_path_factory.mktemp("installation")
        if source is not None:
            _install(folder, source)
        (folder / "libascendcl.so").touch()
        settings = {variable: value.format(folder=folder) for variable, value in settings.items()}
        result = run_code(before + _PROGRAM, folder, **settings)
        assert result.returncode == 0, result.stderr
        *said, facts = result.stdout.splitlines()
        return {**json.loads(facts), "said": said}

    return of


def each(*names):
    """Parametrize a test with installations; unusual ones are exhaustive."""
    marks = {name: () if name in _DEFAULT else (pytest.mark.exhaustive,) for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@each(*INSTALLATIONS)
def test_the_package_imports_changes_no_variable_and_needs_no_library_that_it_integrates(name, found):
    facts = found(name)
    assert facts["sum"] == 2 and facts["environment is unchanged"] and facts["integrated"] == []


@each("no CANN", "no CANN, not loaded by torch")
def test_torch_npu_without_cann_is_hidden_from_other_packages(name, found):
    # transformers, accelerate, peft and Lightning import torch_npu wherever it is found.
    facts = found(name)
    assert facts["is installed"] and not facts["is imported"] and not facts["others find it"]


@each("CANN without a device")
def test_torch_npu_is_loaded_if_cann_is_found(name, found):
    facts = found(name)
    assert facts["said"] == ["imported", "autoloaded"] and facts["is imported"] and facts["why unavailable"] is None


def test_torch_npu_is_not_loaded_if_autoload_is_disabled(found):
    facts = found("disabled")
    assert facts["said"] == []
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables loading torch_npu" in facts["why unavailable"]


_HOW = _installation.how_to_install(torch.__version__)
# The doctor's finding in an installation, and its remedy.
FINDINGS = [
    ("no CANN", "CANN", "not found", "for real NPUs: install CANN and source its set_env.sh"),
    ("no CANN", "NPU", "none: torch_npu is installed, but CANN is not: libascendcl.so", ...),
    ("no CANN", "torch_npu", f"1.0, but torch is {torch.__version__}", _HOW),
    ("CANN not sourced", "CANN", "/opt/cann, but not on the loader's search path", "source /opt/cann/set_env.sh"),
    # No remedies for NPUs where nothing of them is found.
    ("no torch_npu", "torch_npu", "not installed", None),
    ("no torch_npu", "NPU", "none: torch_npu is not installed", ...),
    ("no torch_npu", "CANN", "", None),
    ("no torch_npu", "NPU extension", "", None),
    ("CANN without a device", "NPU", "none: torch_npu is imported, but it finds no device", "check npu-smi info"),
]


@pytest.mark.parametrize(
    ("name", "what", "beginning", "remedy"),
    [pytest.param(*row, marks=() if row[0] in _DEFAULT else pytest.mark.exhaustive) for row in FINDINGS],
)
def test_the_doctor_finds_what_is_missing_and_says_how_to_install_it(name, what, beginning, remedy, found):
    row = found(name)[what]
    assert row["found"].startswith(beginning)
    assert remedy in (..., row["remedy"])


def test_a_torch_npu_of_another_version_is_broken(found):
    assert found("no CANN")["torch_npu"]["is_broken"]


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("2.9.1+cu128", "pip install torch_npu==2.9.1"),
        ("2.12.0", "pip install torch_npu==2.12.0.post3"),
        (
            "2.15.0+cpu",
            "pip install torch==2.14.0 torch_npu==2.14.0, because torch 2.15.0+cpu has no tested torch_npu; on a"
            " machine with an NPU, install the versions for its CANN, see docs/install.md",
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


@pytest.mark.parametrize("name", [name for name in functional.__all__ if hasattr(torchs.functional, name)])
def test_a_drop_in_has_torchs_arguments_and_defaults(name):
    mine, theirs = (torchs.signature(getattr(module, name)).parameters for module in (functional, torchs.functional))
    assert [(p.name, p.kind, p.default) for p in mine.values()][: len(theirs)] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


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


@pytest.mark.exhaustive
def test_a_missing_integration_reports_what_to_install(tmp_path):
    hidden = "import sys; sys.modules['transformers'] = None; import torch_aclnn_ops.integrations\n"
    result = run_code(f"{hidden}import torch_aclnn_ops.integrations.transformers", tmp_path)
    assert re.search(r"ImportError: torch_aclnn_ops.integrations.transformers needs .*: pip install ", result.stderr)
