"""Release metadata: version, changelog, citation and supported versions."""

import re
from pathlib import Path

import torch_aclnn_ops

import pytest
import yaml

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


def test_the_newest_torch_that_is_supported_is_the_one_below_the_limit_of_pip():
    limit = re.search(r'"torch>=[\d.]+,<2\.(\d+)"', PROJECT)[1]
    assert f"to 2.{int(limit) - 1}," in SUPPORT
