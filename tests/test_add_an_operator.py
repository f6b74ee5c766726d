"""docs/add_an_operator.md: its files and changes make an operator that keeps the contracts of all operators."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests._operator_files import missing
from tests._pages import ROOT, blocks, new_side, old_side

PAGE = "docs/add_an_operator.md"
STEPS = [block for block in blocks(PAGE) if block.title]
FILES = sorted({step.title for step in STEPS})
# Files that commands write; the first command takes minutes.
WRITTEN = ["docs/precision.md", "tests/public_api.txt"]


def apply(sources: Path) -> None:
    """Write the page's files and apply its changes, each of which must match exactly one place."""
    for step in STEPS:
        path = sources / step.title
        if step.language != "diff":
            assert not path.exists(), step.title
            path.write_text(step.code)
            continue
        text, old = path.read_text(), old_side(step.code)
        assert text.count(old) == 1, f"{step.title}, line {step.line} of the page"
        path.write_text(text.replace(old, new_side(step.code)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a copy of the sources with the page's operator, without compiled files."""
    folder = tmp_path_factory.mktemp("sources") / "checkout"
    ignored = ".git .venv .matrix .aarch64 .*_cache __pycache__ build *.so _lib".split()
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored))
    apply(folder)
    return folder


def _run(sources, *arguments, **variables):
    variables |= {"PYTHONPATH": f"{sources}:{sources}/host-npu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment = {**os.environ, **variables}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-3000:]
    return result.stdout


def test_the_page_matches_the_sources(sources):
    code = "import torch_aclnn_ops as t, torch; one = torch.ones(2); print(t.functional.softplus(0 * one))"
    assert _run(sources, "-c", code) == "tensor([0.6931, 0.6931])\n"


def test_the_page_states_the_number_of_files_and_lines_within_limits():
    new = [path for path in FILES if not (ROOT / path).exists()]
    code = [(step, line) for step in STEPS for line in step.code.splitlines()]
    lines = [line for step, line in code if step.language != "diff" or line.startswith("+")]
    figures = f"**{len(FILES)} files, {len(new)} of them new, with {len(lines)} lines**"
    assert all(figures in (ROOT / page).read_text() for page in (PAGE, "CONTRIBUTING.md")), figures
    assert len(FILES) <= 11 and len(new) <= 7 and len(lines) <= 330


def test_only_generated_files_are_missing_after_the_page(sources):
    assert [found.path for found in missing(sources)] == WRITTEN


@pytest.mark.parametrize("left_out", FILES)
def test_a_missing_file_is_reported_with_what_to_write(sources, left_out):
    path, before = sources / left_out, ROOT / left_out
    text = path.read_text()
    if before.exists():
        path.write_text(before.read_text())
    else:
        path.unlink()
    try:
        assert left_out in [found.path for found in missing(sources)]
    finally:
        path.write_text(text)


@pytest.mark.exhaustive
def test_the_operator_passes_the_contracts_of_drop_ins_raw_operators_and_modules(sources):
    for command in ("benchmarks.errors", "tests.test_public_api"):
        _run(sources, "-m", command)
    names = ("softplus", "nn", "patch", "layout", "pages", "disabled", "public_api")
    of_torch = "tests/test_package.py::test_a_drop_in_has_torchs_arguments_and_defaults"
    _run(sources, "-m", "pytest", "-q", *(f"tests/test_{name}.py" for name in names), of_torch, "-m", "")
    for tool in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        _run(sources, "-m", *tool)


@pytest.mark.exhaustive
def test_the_extension_and_the_host_npu_compute_it(sources):
    _run(sources, "setup.py", "--quiet", "build_ext", "--inplace", TORCH_ACLNN_NPU="1")
    _run(sources, "host-npu/csrc/build.py")
    tests = ("tests/npu/test_raw_operators.py", "tests/npu/test_drop_ins.py")
    output = _run(sources, "-m", "host_npu", "-m", "pytest", "-q", *tests, "-k", "softplus")
    assert " passed" in output
    _run(sources / "host-npu", "-m", "pytest", "-q", "tests/test_c_interface.py", "-k", "softplus")
