"""torch_npu beside a CUDA build of torch: the host NPU makes it work, a real CANN gets a warning in its place.

Both torch's part for CUDA and torch_npu register settings under the same keys, which ends the process. Stand-ins
register or name the keys here, so that any build of torch will do.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_npu
from torch_aclnn_ops.host_npu import _libraries

import pytest
import torch

_PACKAGE = Path(torch_aclnn_ops.__file__).parents[1]
_COMPILER = shlex.split(os.environ.get("CXX", "g++"))

# What libc10_cuda does when it is loaded; unlike it, this also tells what is registered.
_CUDA_ALLOCATOR = """
#include <c10/core/AllocatorConfig.h>
using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
static const bool registered = [] {
    for (const auto* key : {"pinned_reserve_segment_size_mb", "per_process_memory_fraction", "of_cuda_alone"}) {
        Config::getMutableKeys().insert(key);
    }
    return true;
}();
extern "C" bool is_registered(const char* key) { return registered && Config::getMutableKeys().contains(key); }
"""


def _run(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    search_path = os.pathsep.join(map(str, [*path, _PACKAGE, *sys.path[1:]]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": search_path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def cuda_allocator(tmp_path_factory) -> Path:
    """A library that has registered the keys once it is loaded."""
    if shutil.which(_COMPILER[0]) is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "allocator.cpp").write_text(_CUDA_ALLOCATOR)
    installed = Path(torch.__file__).parent
    command = [*_COMPILER, "-std=c++20", "-fPIC", "-shared", f"-isystem{installed / 'include'}"]
    command += [str(folder / "allocator.cpp"), "-o", str(folder / "allocator.so"), f"-L{installed / 'lib'}", "-lc10"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return folder / "allocator.so"


@pytest.mark.skipif(bool(_libraries.missing()), reason="the host NPU was not built")
def test_the_host_npu_runs_where_the_keys_of_torch_npu_are_registered_already(cuda_allocator):
    code = (
        "import ctypes, torch_aclnn_ops\n"
        "from torch_aclnn_ops import host_npu\n"
        f"cuda = ctypes.CDLL({str(cuda_allocator)!r})\n"
        "host_npu.enable()\n"
        "import torch\n"
        "keys = (b'pinned_reserve_segment_size_mb', b'of_cuda_alone', b'expandable_segments', b'unheard_of')\n"
        "print(torch.ones(2, device='npu').sum().item(), *map(cuda.is_registered, keys))"
    )
    result = _run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    assert result.stdout.splitlines()[-1:] == ["2.0 1 1 1 0"], result.stderr


# Of a real CANN: what would be imported, and where its libraries are.

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
            "import ctypes, types; from importlib.machinery import PathFinder\n"
            "load, find = ctypes.CDLL, PathFinder.find_spec\n"
            "cann = ('libacl', 'libascendcl', 'libhccl', 'libge_', 'libgraph')\n"
            "is_cann = lambda name: str(name).rpartition('/')[2].startswith(cann)\n"
            "ctypes.CDLL = lambda name, *a, **k: None if is_cann(name) else load(name, *a, **k)\n"
            f"stand_in = types.SimpleNamespace(origin={str(tmp_path / 'cuda' / 'torch' / '__init__.py')!r})\n"
            # An import gives no path; who looks where packages are installed does.
            "PathFinder.find_spec = lambda name, path=None, *a: (\n"
            "    stand_in if name == 'torch' and path else find(name, path, *a)\n"
            ")\n"
        )

    return install


def test_importing_the_package_warns_in_place_of_ending_the_process(installed, tmp_path):
    code = installed(_CALL) + (
        "import torch_aclnn_ops, torch\nprint(torch.ones(2).sum().item(), torch_aclnn_ops._torch_npu.why_unavailable())"
    )
    result = _run(code, tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    expected = (
        "the installed torch is a CUDA build, with which torch_npu ends the process when it is imported. "
        "To use NPUs, install the CPU build of the same version of torch in its place"
    )
    assert result.stdout == f"2.0 {expected}\n", result.stderr
    assert f"RuntimeWarning: torch_aclnn_ops: {expected}." in result.stderr


def test_the_doctor_tells_the_conflict_and_the_remedy(installed, tmp_path):
    metadata = tmp_path / f"torch_npu-{torch.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {torch.__version__.partition('+')[0]}\n"
    )
    code = (
        installed(_CALL)
        + "import torch_aclnn_ops; ctypes.CDLL = load\nfrom torch_aclnn_ops import doctor; doctor.main(['--json'])"
    )
    result = _run(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    (found,) = (row for row in json.loads(result.stdout)["findings"] if row["what"] == "torch_npu")
    assert "the installed torch is a CUDA build, with which torch_npu ends the process" in found["found"]
    assert found["remedy"].startswith("To use NPUs, install the CPU build of the same version of torch in its place;")


def test_nobody_is_warned_who_switched_torch_npu_off(installed, tmp_path):
    code = installed(_CALL) + "import torch_aclnn_ops; print(torch_aclnn_ops._torch_npu.conflict())"
    result = _run(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", LD_LIBRARY_PATH=str(tmp_path))
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
def test_there_is_no_conflict_with(installed, tmp_path, of_torch, of_torch_npu):
    code = installed(of_torch, of_torch_npu) + (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "from torch_aclnn_ops import _torch_npu; print(_torch_npu.conflict())"
    )
    result = _run(code, tmp_path)
    assert (result.stdout, result.returncode) == ("None\n", 0), result.stderr


def test_there_is_no_conflict_once_torch_npu_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", object())
    assert _torch_npu.conflict() is None
