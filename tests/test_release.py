"""Release metadata: version, changelog, citation and supported versions; and the parts that setup.py skips."""

import os
import re
import runpy
import sys
from pathlib import Path

import torch_aclnn_ops

import pytest
import yaml
from host_npu.testing import outcomes

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT.joinpath("pyproject.toml").read_text()
CHANGELOG = ROOT.joinpath("CHANGELOG.md").read_text()
CITATION = yaml.safe_load(ROOT.joinpath("CITATION.cff").read_text())
SUPPORT = ROOT.joinpath("docs/versions.md").read_text()


def _newest_release() -> tuple[str, str]:
    heads = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    released = next(head for head in heads if head != "Unreleased")
    return re.fullmatch(r"(\S+) \((\d{4}-\d\d-\d\d)\)", released).groups()


def test_the_changelog_has_this_version():
    assert _newest_release()[0] == torch_aclnn_ops.__version__


def test_both_projects_have_the_same_version():
    stated = ROOT.joinpath("host-npu/host_npu/_version.py").read_text()
    assert f'__version__ = "{torch_aclnn_ops.__version__}"' in stated


def test_the_citation_is_of_the_newest_release():
    assert (CITATION["version"], str(CITATION["date-released"])) == _newest_release()
    assert f'license = "{CITATION["license"]}"' in PROJECT


@pytest.mark.parametrize("package", ["torch", "transformers", "lightning"])
def test_the_supported_versions_are_those_that_pip_installs(package):
    least = re.search(rf'"{package}>=([\d.]+)', PROJECT)[1]
    row = next(row for row in SUPPORT.splitlines() if row.startswith("|") and package in row.partition("|")[2].lower())
    assert re.search(rf"(?<![\d.]){re.escape(least)}(?![\d])", row)


ISOLATED = "(pip sees what is installed with --no-build-isolation only)"


def name_of_the_package(device, without):
    """Run setup.py in a process in which packages appear not installed; return its exit message."""
    with pytest.MonkeyPatch.context() as patch:
        for package in without.split():
            patch.setitem(sys.modules, package, None)
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["setup.py", "--name"])
        try:
            runpy.run_path("setup.py", run_name="__main__")
        except SystemExit as end:
            return end.code
    return None


@pytest.mark.parametrize(
    ("without", "switches", "status", "said"),
    [
        ("", {"TORCH_ACLNN_NPU": "0"}, 0, "built without the NPU extension: TORCH_ACLNN_NPU=0"),
        ("torch_npu", {}, 0, f"built without the NPU extension: no torch_npu {ISOLATED}"),
        ("torch", {}, 0, f"built without the CPU kernels: no torch {ISOLATED}"),
        ("torch", {"TORCH_ACLNN_CPU": "1"}, 1, "TORCH_ACLNN_CPU=1 asks for the CPU kernels, but there is no torch"),
        ("", {"TORCH_ACLNN_CPU": "yes"}, 1, "TORCH_ACLNN_CPU must be 0, 1 or empty, but it is 'yes'"),
    ],
)
def test_a_part_that_is_left_out_is_named_with_the_reason(without, switches, status, said):
    given = {name: "" for name in os.environ if name.startswith("TORCH_ACLNN_")} | switches
    [outcome] = outcomes(name_of_the_package, 1, without, backend="", environment=given)
    assert outcome.error is None, outcome.error
    assert bool(outcome.value) == bool(status), outcome.output
    assert f"torch_aclnn_ops: {said}" in outcome.output + str(outcome.value)
