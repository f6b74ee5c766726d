"""The host NPU makes torch_npu work beside a CUDA build of torch.

Both torch's part for CUDA and torch_npu register settings under the same keys, which ends the process. A library
registers the keys here, so that any build of torch will do.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import host_npu
import pytest
import torch

_PACKAGE = Path(host_npu.__file__).parents[1]
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


def test_the_host_npu_runs_where_the_keys_of_torch_npu_are_registered_already(cuda_allocator):
    code = (
        "import ctypes, host_npu, torch\n"
        f"cuda = ctypes.CDLL({str(cuda_allocator)!r})\n"
        "host_npu.enable()\n"
        "import torch\n"
        "keys = (b'pinned_reserve_segment_size_mb', b'of_cuda_alone', b'expandable_segments', b'unheard_of')\n"
        "print(torch.ones(2, device='npu').sum().item(), *map(cuda.is_registered, keys))"
    )
    result = _run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    assert result.stdout.splitlines()[-1:] == ["2.0 1 1 1 0"], result.stderr
