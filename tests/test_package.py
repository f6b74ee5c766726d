"""Importing the package and asking the doctor, with torch_npu absent, without CANN, and with it."""

import os
import pathlib
import re
import subprocess
import sys

import torch_aclnn_ops
from torch_aclnn_ops import doctor, functional, ops

import pytest
import torch

# A fake torch_npu package that counts as installed; it raises as the real one does where it cannot be loaded.
_BROKEN_TORCH_NPU = 'raise ImportError("libhccl.so: cannot open shared object file")'

# Lets CANN's libraries be found.
_WITH_CANN = """
import ctypes
load = ctypes.CDLL
cann = ("libacl", "libascendcl", "libhccl", "libge_", "libgraph")
ctypes.CDLL = lambda name, *args, **options: None if str(name).startswith(cann) else load(name, *args, **options)
"""


def _run(code: str, path: pathlib.Path, **environment: str) -> subprocess.CompletedProcess:
    package = pathlib.Path(torch_aclnn_ops.__file__).parents[1]
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    search_path = os.pathsep.join([str(path), str(package), *sys.path[1:]])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": search_path, **environment},
        capture_output=True,
        text=True,
    )


def _entry_point(path: pathlib.Path, package: str) -> None:
    """Make a package count as a device backend that torch loads by itself."""
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


def test_torch_alone_fails_where_torch_npu_has_no_cann(without_cann):
    # What the package has to work around; if this starts to pass, the work-around can go.
    assert _run("import torch", without_cann).returncode != 0


def test_the_package_imports_where_torch_npu_has_no_cann(without_cann):
    result = _run("import torch_aclnn_ops, torch; print(torch.ones(1) + 1)", without_cann)
    assert result.returncode == 0, result.stderr


def test_the_environment_is_as_before_after_the_import(without_cann):
    code = "import torch_aclnn_ops, os; print(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))"
    assert _run(code, without_cann).stdout.strip() == "None"
    assert _run(code, without_cann, TORCH_DEVICE_BACKEND_AUTOLOAD="1").stdout.strip() == "1"


def test_the_doctor_says_that_cann_is_missing(without_cann):
    result = _run("import runpy; runpy.run_module('torch_aclnn_ops.doctor', run_name='__main__')", without_cann)
    assert result.returncode == 0, result.stderr
    assert "torch_npu is installed, but CANN is not: libascendcl.so" in result.stdout


def test_the_package_imports_without_torch_npu(tmp_path):
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch_npu' else find(name, *rest)\n"
        "from torch_aclnn_ops import doctor; print(doctor.describe())"
    )
    result = _run(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    assert "NPU:              none: torch_npu is not installed" in result.stdout


def test_torch_npu_is_loaded_where_cann_can_be(tmp_path):
    # A torch_npu that loads, and CANN libraries that do: empty shared objects under CANN's names.
    (tmp_path / "torch_npu.py").write_text("def _autoload(): print('autoloaded')")
    _entry_point(tmp_path, "torch_npu")
    code = (
        f"{_WITH_CANN}\n"
        "import torch_aclnn_ops, sys; print('torch_npu' in sys.modules, torch_aclnn_ops._torch_npu.why_unavailable())"
    )
    result = _run(code, tmp_path)
    assert result.stdout.split("\n")[:2] == ["autoloaded", "True None"], result.stderr


def test_torch_npu_is_left_alone_where_autoload_is_off(tmp_path):
    (tmp_path / "torch_npu.py").write_text("print('imported')")
    (tmp_path / "libascendcl.so").touch()
    code = "import torch_aclnn_ops; print(torch_aclnn_ops._torch_npu.why_unavailable())"
    result = _run(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", LD_LIBRARY_PATH=str(tmp_path))
    assert "imported" not in result.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch_npu from being loaded" in result.stdout


def test_the_doctor_names_every_operator_and_its_path():
    lines = doctor.describe().splitlines()
    paths = {line.split()[0]: line for line in lines[lines.index("") + 2 :]}
    assert sorted(paths) == sorted(operator.name for operator in map(lambda name: getattr(ops, name), ops.__all__))
    assert "native kernel of torch" in paths["mse_loss_backward"]
    assert "formula in torch calls" in paths["fused_linear_online_max_sum"]


@pytest.mark.parametrize("name", [name for name in functional.__all__ if hasattr(torch.nn.functional, name)])
def test_a_drop_in_has_torchs_arguments_and_defaults(name):
    import inspect

    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (functional, torch.nn.functional))
    assert [(p.name, p.kind, p.default) for p in mine.values()][: len(theirs)] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_a_subclass_of_tensor_keeps_torchs_behaviour():
    class Tagged(torch.Tensor):
        pass

    tagged = torch.rand(3).as_subclass(Tagged)
    assert type(functional.mse_loss(tagged, tagged)) is Tagged


def test_a_default_device_does_not_take_calls_away(monkeypatch):
    # torch.set_default_device puts a mode on all torch functions, which has_torch_function takes for an override.
    called = []
    from torch_aclnn_ops.functional import mse_loss

    module = sys.modules[mse_loss.__module__]
    original = module._mse_loss
    monkeypatch.setattr(module, "_mse_loss", lambda *args: called.append(1) or original(*args))
    with torch.device("cpu"):
        functional.mse_loss(torch.rand(3), torch.rand(3))
    assert called


def test_every_test_that_the_readme_names_exists():
    here = pathlib.Path(__file__).parent
    files = {path: path.read_text() for path in here.rglob("*.py")}
    named = re.findall(r"`(test_\w+|Test\w+)(?:\.py)?`", (here.parent / "README.md").read_text())
    assert len(named) > 10
    for name in named:
        is_file = (here / f"{name}.py").exists()
        assert is_file or any(re.search(rf"^ *(def|class) {name}\b", text, re.M) for text in files.values()), name
