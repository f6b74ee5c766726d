"""The host NPU makes torch_npu work with a CUDA build of torch.

torch's CUDA part and torch_npu register settings under the same keys, which aborts the process. Here a library
registers the keys, so that the tests need no CUDA build.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import host_npu
import pytest
import torch
from host_npu import testing

_COMPILER = shlex.split(os.environ.get("CXX", "g++"))

# Like libc10_cuda when it is loaded; also reports the registered keys.
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


@pytest.fixture(scope="module")
def cuda_allocator(tmp_path_factory) -> Path:
    """Return a library that registers the keys when it is loaded."""
    if shutil.which(_COMPILER[0]) is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "allocator.cpp").write_text(_CUDA_ALLOCATOR)
    installed = Path(torch.__file__).parent
    command = [*_COMPILER, "-std=c++20", "-fPIC", "-shared", f"-isystem{installed / 'include'}"]
    command += [str(folder / "allocator.cpp"), "-o", str(folder / "allocator.so"), f"-L{installed / 'lib'}", "-lc10"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return folder / "allocator.so"


def _computed(device, cuda_allocator):
    cuda = ctypes.CDLL(cuda_allocator)
    host_npu.enable()
    keys = (b"pinned_reserve_segment_size_mb", b"of_cuda_alone", b"expandable_segments", b"unheard_of")
    return torch.ones(2, device="npu").sum().item(), [cuda.is_registered(key) for key in keys]


def test_the_host_npu_runs_where_the_keys_of_torch_npu_are_registered_already(cuda_allocator):
    environment = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    found = testing.run(_computed, 1, str(cuda_allocator), backend="", environment=environment)
    assert found == [(2.0, [1, 1, 1, 0])]
