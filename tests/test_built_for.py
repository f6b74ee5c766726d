"""The versions recorded in compiled extensions, and the errors for other installed versions."""

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops._built_for import incompatibility, write_header

import pytest

from tests._children import run_python

PACKAGE = Path(torch_aclnn_ops.__file__).parent


@pytest.fixture
def installed(monkeypatch):
    """Versions that count as installed, and may be changed."""
    versions = {"torch": "2.13.0+cu130", "torch_npu": "2.13.0"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.fixture
def library(installed, tmp_path):
    """A library that was compiled for what is installed first."""
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
            ("torch", "torch_npu"),
            "for torch 2.13.0 and torch_npu 2.13.0, but torch 2.14.0 and torch_npu 2.14.0 are installed",
        ),
        ({"torch": "2.13.1"}, ("torch",), "it was compiled for torch 2.13.0, but torch 2.13.1 is installed"),
        (
            {"torch_npu": "2.13.0.post1"},
            ("torch", "torch_npu"),
            "but torch 2.13.0 and torch_npu 2.13.0.post1 are installed",
        ),
        ({"torch_npu": "2.14.0"}, ("torch",), None),
        ({"torch": "2.13.0+cpu"}, ("torch", "torch_npu"), None),
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


def _copy_built_for_another_torch(folder):
    """Copy the package, whose compiled parts then say that they are for a torch of the same length of name."""
    copy = folder / "torch_aclnn_ops"
    shutil.copytree(PACKAGE, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for library in copy.rglob("*.so"):
        content = library.read_bytes()
        library.write_bytes(re.sub(rb"(is compiled for torch )[0-9]", rb"\g<1>1", content))


def test_an_extension_for_another_torch_is_not_loaded(tmp_path):
    code = "import host_npu; host_npu.enable()\n"
    code += "from torch_aclnn_ops import _extension; raise SystemExit(_extension.why_unavailable())"
    _copy_built_for_another_torch(tmp_path)
    result = run_python("-c", code, path=[tmp_path], cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode != 0 and "it was compiled for torch 1." in result.stderr
    assert "but torch" in result.stderr and "--no-build-isolation" in result.stderr
