"""The pages name what exists in this project; tests/npu/test_pages.py runs the README's code."""

import re
import subprocess
import sys

import host_npu
import pytest
from host_npu import __main__ as runner
from host_npu import testing

from tests._pages import PAGES, PROJECT, README, blocks


def _named(pattern: str) -> list[str]:
    return sorted({found for page in PAGES for found in re.findall(pattern, page.read_text())})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_of_this_project(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    targets = [(page.parent / link).resolve() for link in links if link]
    assert not [target for target in targets if not (target.is_file() and target.is_relative_to(PROJECT))]


def test_every_command_of_the_readme_is_one_of_pip_or_has_the_host_npu_in_it():
    commands = [line for _, code in blocks(README, "sh") for line in code.splitlines()]
    assert commands and all(line.startswith("pip install ") or "-m host_npu " in line for line in commands)


def test_the_command_has_the_options_that_the_readme_names():
    help_text = runner._parser().format_help()
    named = re.findall(r"^\| `(--[a-z-]+)`, ", README.read_text(), re.MULTILINE)
    assert named == ["--devices", "--soc", "--strict-memory", "--force"] and all(name in help_text for name in named)


def test_every_environment_variable_that_a_page_names_is_read_somewhere():
    patterns = ("setup.py", "csrc/**/*.cpp", "csrc/**/*.h", "csrc/*.py", "host_npu/**/*.py")
    text = "".join(path.read_text() for pattern in patterns for path in PROJECT.glob(pattern))
    assert not [name for name in _named(r"\b(HOST_NPU_[A-Z_]+)\b") if name not in text]


def test_every_test_that_a_page_names_exists():
    assert _named(r"tests/test_\w+\.py")
    assert not [name for name in _named(r"tests/(?:npu/)?test_\w+\.py") if not (PROJECT / name).exists()]


def test_every_target_of_make_that_the_readme_names_exists():
    targets = re.findall(r"^([\w-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z][\w-]*)`", README.read_text())) <= set(targets)


def test_the_reference_lists_every_public_name():
    reference = (PROJECT / "docs/reference.md").read_text()
    names = [*host_npu.__all__, *testing.__all__]
    assert not [name for name in names if name != "__version__" and not re.search(rf"\b{name}\b", reference)]


def test_the_import_of_the_package_imports_nothing_else_that_is_installed():
    # It is imported before torch, and in every child process.
    code = "import sys, host_npu; print({'torch', 'torch_npu', 'torch_aclnn_ops', 'numpy'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "set()\n", result.stderr
