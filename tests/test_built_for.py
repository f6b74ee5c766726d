"""The versions recorded in compiled extensions, and the errors for other installed versions."""

import importlib.metadata
import importlib.util
import re
import subprocess
from pathlib import Path

from torch_aclnn_ops import _extension, _torch_npu
from torch_aclnn_ops._built_for import incompatibility, write_header

import pytest


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
