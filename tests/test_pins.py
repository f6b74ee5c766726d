"""What CI installs is pinned with hashes, in the versions of pyproject.toml."""

import re
import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = (ROOT / ".ci/requirements.txt").read_text()
VERSIONS = {canonicalize_name(name): version for name, version in re.findall(r"^(\S+)==(\S+)", PINS, re.MULTILINE)}
TOOLS = runpy.run_path(str(ROOT / ".ci/pins.py"))["tools"]()


def _requirements() -> list[Requirement]:
    """Everything that the projects say they need, of the tools and of users."""
    texts = [(ROOT / project / "pyproject.toml").read_text() for project in (".", "host-npu")]
    lines = [line for text in texts for line in text.splitlines() if re.match(r"(\w+ = |dependencies = )\[\"", line)]
    quoted = [text for line in lines for text in re.findall(r'"([^"]+)"', line)]
    return [Requirement(text) for text in quoted if re.fullmatch(r"[A-Za-z][\w.-]*([<>=]=?[\w.,<>=]+)?", text)]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_is_pinned_to_a_version_that_it_may_have(tool):
    wanted = Requirement(tool)
    assert wanted.specifier.contains(VERSIONS[canonicalize_name(wanted.name)])


def test_pins_fit_every_requirement_of_both_projects():
    found = [wanted for wanted in _requirements() if canonicalize_name(wanted.name) in VERSIONS]
    assert {"pytest", "ruff", "mkdocs", "setuptools"} <= {wanted.name for wanted in found}
    unfit = [str(wanted) for wanted in found if not wanted.specifier.contains(VERSIONS[canonicalize_name(wanted.name)])]
    assert not unfit


def test_every_pin_has_a_hash_and_no_address_of_a_registry():
    blocks = re.split(r"\n(?=\S)", re.sub(r"^(#.*)?\n", "", PINS, flags=re.MULTILINE).strip())
    line = r" \\\n    --hash=sha256:[0-9a-f]{64}"
    assert not [block[:40] for block in blocks if not re.fullmatch(rf"[\w.-]+==[\w.]+(?:{line})+", block)]


def test_torch_and_torch_npu_are_not_pinned_by_hashes():
    assert not {"torch", "torch-npu"} & {*VERSIONS}
