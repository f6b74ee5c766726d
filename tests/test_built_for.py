"""Versions recorded in compiled extensions, the errors for others, and the warning about a CUDA build with CANN."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from torch_aclnn_ops import _extension, _torch_npu
from torch_aclnn_ops._built_for import incompatibility, write_header

import pytest

from tests._children import run_code

BOTH = ("torch", "torch_npu")


@pytest.fixture
def installed(monkeypatch):
    """The versions that are reported as installed; tests may change them."""
    versions = {"torch": "2.13.0+cu130", "torch_npu": "2.13.0"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.fixture
def library(installed, tmp_path):
    """A library compiled for the initially installed versions."""
    source, target = tmp_path / "source.cpp", tmp_path / "library.so"
    source.write_text("int nothing() { return 0; }")
    header = write_header(tmp_path / "build" / "built_for.h")
    command = ["g++", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-include", str(header), str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def test_a_library_is_compatible_with_the_versions_it_was_compiled_for(library):
    assert incompatibility(library, "torch", "torch_npu") is None


@pytest.mark.parametrize(
    ("versions", "packages", "sentence"),
    [
        (
            {"torch": "2.14.0", "torch_npu": "2.14.0"},
            BOTH,
            "for torch 2.13.0 and torch_npu 2.13.0, but torch 2.14.0 and torch_npu 2.14.0 are installed",
        ),
        ({"torch": "2.13.1"}, ("torch",), "it was compiled for torch 2.13.0, but torch 2.13.1 is installed"),
        ({"torch_npu": "2.13.0.post1"}, BOTH, "but torch 2.13.0 and torch_npu 2.13.0.post1 are installed"),
        ({"torch_npu": "2.14.0"}, ("torch",), None),
        ({"torch": "2.13.0+cpu"}, BOTH, None),
    ],
)
def test_other_versions_are_incompatible_and_the_message_names_both_and_the_remedy(
    versions, packages, sentence, library, installed
):
    installed.update(versions)
    reason = incompatibility(library, *packages)
    if sentence is None:
        assert reason is None
    else:
        assert sentence in reason
        assert reason.endswith("; install torch_aclnn_ops again with pip's --no-build-isolation")


def test_a_library_without_recorded_versions_is_incompatible(library):
    library.write_bytes(b"a library from before")
    assert incompatibility(library, "torch").startswith("it does not record the versions it was compiled for; install")


def test_an_extension_for_another_torch_is_not_loaded(tmp_path, monkeypatch):
    content = Path(importlib.util.find_spec("torch_aclnn_ops._C").origin).read_bytes()
    library = tmp_path / "_C.so"
    library.write_bytes(re.sub(rb"(is compiled for torch )[0-9]", rb"\g<1>1", content))
    spec = importlib.util.spec_from_file_location("_C", library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(_torch_npu, "is_imported", lambda: True)
    monkeypatch.setattr(_extension, "_reason", None)
    reason = _extension.load()
    assert reason.startswith("it was compiled for torch 1.") and "but torch" in reason
    assert reason.endswith("--no-build-isolation") and _extension.why_unavailable() == reason


# torch's CUDA part and torch_npu register settings under the same keys, which aborts the process. Files that contain
# the keys stand in for both, so that the test needs no CUDA build.
CALL = b"\x7fELF _ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"
MESSAGE = (
    "the installed torch is a CUDA build, with which importing torch_npu aborts the process. "
    "To use NPUs, install the CPU build of the same torch version instead"
)


@pytest.mark.parametrize(
    ("of_torch", "of_torch_npu", "message"),
    [(CALL, CALL, MESSAGE), (None, CALL, None), (b"\x7fELF of 2.9", CALL, None), (CALL, b"\x7fELF of 2.9", None)],
    ids=["a CUDA build", "a CPU build", "a torch that registers nothing", "a torch_npu that registers nothing"],
)
def test_a_cuda_build_of_torch_and_torch_npu_conflict(of_torch, of_torch_npu, message, tmp_path, monkeypatch):
    for package, name, content in (("torch", "c10_cuda", of_torch), ("torch_npu", "torch_npu", of_torch_npu)):
        (tmp_path / package / "lib").mkdir(parents=True)
        if content is not None:
            (tmp_path / package / "lib" / f"lib{name}.so").write_bytes(content)
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
        # CANN's libraries can be loaded, and have not been loaded before.
        "is_cann = lambda name: str(name).startswith(('libacl', 'libascendcl', 'libhccl', 'libge_', 'libgraph'))\n"
        "ctypes.CDLL = lambda name, *a, **k: is_cann(name) and a != (os.RTLD_NOLOAD,) or load(name, *a, **k)\n"
        # An import passes more arguments than a search for a package.
        f"torch = types.SimpleNamespace(origin={str(tmp_path / 'cuda' / '__init__.py')!r})\n"
        "PathFinder.find_spec = lambda name, *a: torch if name == 'torch' and not a else find(name, *a)\n"
        "import torch_aclnn_ops, torch\n"
        "print(torch.ones(2).sum().item(), torch_aclnn_ops._torch_npu.why_unavailable())"
    )
    result = run_code(code, tmp_path)
    assert result.stdout == f"2.0 {MESSAGE}\n", result.stderr
    assert f"RuntimeWarning: torch_aclnn_ops: {MESSAGE}." in result.stderr
