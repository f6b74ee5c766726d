"""torch_npu with a CUDA build of torch and a real CANN: a warning instead of an abort.

Both torch's part for CUDA and torch_npu register settings under the same keys, which ends the process. Files that name
the keys stand in for both, so that any build of torch will do.
"""

import sys

from torch_aclnn_ops import _torch_npu

import pytest

from tests._children import run_code

CALL = b"\x7fELF _ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"
MESSAGE = (
    "the installed torch is a CUDA build, with which importing torch_npu aborts the process. "
    "To use NPUs, install the CPU build of the same torch version instead"
)


@pytest.mark.parametrize(
    ("of_torch", "of_torch_npu", "message"),
    [
        pytest.param(CALL, CALL, MESSAGE, id="a CUDA build"),
        pytest.param(None, CALL, None, id="a CPU build"),
        pytest.param(b"\x7fELF of 2.9", CALL, None, id="a torch that registers nothing"),
        pytest.param(CALL, b"\x7fELF of 2.9", None, id="a torch_npu that registers nothing"),
    ],
)
def test_a_cuda_build_of_torch_and_torch_npu_conflict(of_torch, of_torch_npu, message, tmp_path, monkeypatch):
    for package, name, content in (
        ("torch", "libc10_cuda.so", of_torch),
        ("torch_npu", "libtorch_npu.so", of_torch_npu),
    ):
        (tmp_path / package / "lib").mkdir(parents=True)
        if content is not None:
            (tmp_path / package / "lib" / name).write_bytes(content)
    monkeypatch.setattr(_torch_npu, "_find", lambda package: str(tmp_path / package / "__init__.py"))
    assert _torch_npu.conflict() == message
    monkeypatch.setitem(sys.modules, "torch_npu", object())
    assert _torch_npu.conflict() is None  # once torch_npu is imported


def test_importing_the_package_warns_instead_of_aborting_the_process(tmp_path):
    (tmp_path / "torch_npu" / "lib").mkdir(parents=True)
    (tmp_path / "torch_npu" / "lib" / "libtorch_npu.so").write_bytes(CALL)
    (tmp_path / "torch_npu" / "__init__.py").write_text("import os; os.abort()")
    (tmp_path / "cuda" / "lib").mkdir(parents=True)
    (tmp_path / "cuda" / "lib" / "libc10_cuda.so").write_bytes(CALL)
    code = (
        "import ctypes, os, types; from importlib.machinery import PathFinder\n"
        "load, find = ctypes.CDLL, PathFinder.find_spec\n"
        # CANN's libraries can be loaded, and are not before.
        "is_cann = lambda name: str(name).startswith(('libacl', 'libascendcl', 'libhccl', 'libge_', 'libgraph'))\n"
        "ctypes.CDLL = lambda name, *a, **k: is_cann(name) and a != (os.RTLD_NOLOAD,) or load(name, *a, **k)\n"
        # An import passes more arguments than who looks for a package.
        f"torch = types.SimpleNamespace(origin={str(tmp_path / 'cuda' / '__init__.py')!r})\n"
        "PathFinder.find_spec = lambda name, *a: torch if name == 'torch' and not a else find(name, *a)\n"
        "import torch_aclnn_ops, torch\n"
        "print(torch.ones(2).sum().item(), torch_aclnn_ops._torch_npu.why_unavailable())"
    )
    result = run_code(code, tmp_path)
    assert result.stdout == f"2.0 {MESSAGE}\n", result.stderr
    assert f"RuntimeWarning: torch_aclnn_ops: {MESSAGE}." in result.stderr
