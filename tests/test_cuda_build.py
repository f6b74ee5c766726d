"""torch_npu with a CUDA build of torch and a real CANN: a warning instead of an abort.

Both torch's part for CUDA and torch_npu register settings under the same keys, which ends the process. Files that name
the keys stand in for both, so that any build of torch will do.
"""

import json
import sys
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_npu

import pytest
import torch

from tests._children import run_code

_PACKAGE = Path(torch_aclnn_ops.__file__).parents[1]


# What would be imported, and where CANN's libraries are.

_CALL = b"\x7fELF _ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"


def _library(folder: Path, name: str, content: bytes) -> None:
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "lib" / name).write_bytes(content)


@pytest.fixture
def installed(tmp_path):
    """Install a torch of some build and a torch_npu that ends the process, where code that is returned looks."""

    def install(of_torch: bytes | None, of_torch_npu: bytes = _CALL) -> str:
        _library(tmp_path / "torch_npu", "libtorch_npu.so", of_torch_npu)
        (tmp_path / "torch_npu" / "__init__.py").write_text("import os; os.abort()")
        for name in _torch_npu._CANN_LIBRARIES:
            (tmp_path / name).touch()
        if of_torch is not None:
            _library(tmp_path / "cuda" / "torch", "libc10_cuda.so", of_torch)
        return (
            "import ctypes, os, types; from importlib.machinery import PathFinder\n"
            "load, find = ctypes.CDLL, PathFinder.find_spec\n"
            "cann = ('libacl', 'libascendcl', 'libhccl', 'libge_', 'libgraph')\n"
            "is_cann = lambda name: str(name).rpartition('/')[2].startswith(cann)\n"
            # Loaded on demand, and not before.
            "def stand_in_for_cann(name, *a, **k):\n"
            "    if not is_cann(name) or a == (os.RTLD_NOLOAD,):\n"
            "        return load(name, *a, **k)\n"
            "ctypes.CDLL = stand_in_for_cann\n"
            f"stand_in = types.SimpleNamespace(origin={str(tmp_path / 'cuda' / 'torch' / '__init__.py')!r})\n"
            # An import gives no path; who looks where packages are installed does.
            "PathFinder.find_spec = lambda name, path=None, *a: (\n"
            "    stand_in if name == 'torch' and path else find(name, path, *a)\n"
            ")\n"
        )

    return install


def test_importing_the_package_warns_instead_of_aborting_the_process(installed, tmp_path):
    code = installed(_CALL) + (
        "import torch_aclnn_ops, torch\nprint(torch.ones(2).sum().item(), torch_aclnn_ops._torch_npu.why_unavailable())"
    )
    result = run_code(code, tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    expected = (
        "the installed torch is a CUDA build, with which importing torch_npu aborts the process. "
        "To use NPUs, install the CPU build of the same torch version instead"
    )
    assert result.stdout == f"2.0 {expected}\n", result.stderr
    assert f"RuntimeWarning: torch_aclnn_ops: {expected}." in result.stderr


@pytest.mark.exhaustive
def test_the_doctor_reports_the_conflict_and_the_remedy(installed, tmp_path):
    metadata = tmp_path / f"torch_npu-{torch.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {torch.__version__.partition('+')[0]}\n"
    )
    code = (
        installed(_CALL)
        + "import torch_aclnn_ops; ctypes.CDLL = load\nfrom torch_aclnn_ops import doctor; doctor.main(['--json'])"
    )
    result = run_code(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    (found,) = (row for row in json.loads(result.stdout)["findings"] if row["what"] == "torch_npu")
    assert "the installed torch is a CUDA build, with which importing torch_npu aborts the process" in found["found"]
    assert found["remedy"].startswith("To use NPUs, install the CPU build of the same torch version instead;")


def test_there_is_no_warning_if_torch_npu_is_disabled(installed, tmp_path):
    code = installed(_CALL) + "import torch_aclnn_ops; print(torch_aclnn_ops._torch_npu.conflict())"
    result = run_code(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", LD_LIBRARY_PATH=str(tmp_path))
    assert "is a CUDA build" in result.stdout
    assert "Warning" not in result.stderr


@pytest.mark.parametrize(
    ("of_torch", "of_torch_npu"),
    [
        pytest.param(None, _CALL, id="a CPU build", marks=pytest.mark.exhaustive),
        pytest.param(b"\x7fELF of 2.9", _CALL, id="a torch that registers nothing"),
        pytest.param(_CALL, b"\x7fELF of 2.9", id="a torch_npu that registers nothing", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_there_is_no_conflict_with(installed, tmp_path, of_torch, of_torch_npu):
    code = installed(of_torch, of_torch_npu) + (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "from torch_aclnn_ops import _torch_npu; print(_torch_npu.conflict())"
    )
    result = run_code(code, tmp_path)
    assert (result.stdout, result.returncode) == ("None\n", 0), result.stderr


def test_there_is_no_conflict_once_torch_npu_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", object())
    assert _torch_npu.conflict() is None
