"""The search for known vulnerabilities distinguishes findings from an unavailable database."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLEAN = {"name": "numpy", "version": "1.0", "vulns": []}
FLAWED = {"name": "tqdm", "version": "4.0", "vulns": [{"id": "CVE-1", "fix_versions": ["4.1"]}]}
UNKNOWN = {"name": "torch", "skip_reason": "torch is not there"}
OFFLINE = "ConnectionError: no route"
CASES = {
    "nothing known": ([CLEAN], 0, "1 packages checked, 0 known vulnerabilities, 0 packages not checked"),
    "a vulnerability": ([CLEAN, FLAWED], 1, "tqdm 4.0: CVE-1, fixed in 4.1"),
    "a package that the database lacks": ([CLEAN, UNKNOWN], 2, "not checked: torch is not there"),
    "both": ([FLAWED, UNKNOWN], 1, "1 packages checked, 1 known vulnerabilities, 1 packages not checked"),
    "no database": (None, 2, f"not checked: {OFFLINE}"),
}


@pytest.fixture
def audit(tmp_path):
    """Run the search with a replacement of pip-audit that records its arguments."""

    def run(packages):
        answer = f"print({json.dumps({'dependencies': packages})!r})" if packages else f"sys.exit({OFFLINE!r})"
        tool = tmp_path / "tool"
        keep = f"open({str(tmp_path / 'asked')!r}, 'w').write(open(sys.argv[-1]).read())"
        tool.write_text(f"#!{sys.executable}\nimport sys\n{keep}\n{answer}\n")
        tool.chmod(0o755)
        return subprocess.run([sys.executable, ".ci/audit.py", tool], cwd=ROOT, capture_output=True, text=True)

    return run


@pytest.mark.parametrize(("packages", "status", "line"), CASES.values(), ids=CASES)
def test_the_exit_status_distinguishes_findings_from_failed_checks(packages, status, line, audit):
    result = audit(packages)
    assert result.returncode == status, result.stderr
    assert line in result.stdout.splitlines()


def test_every_pinned_and_installed_package_is_checked(audit, tmp_path):
    audit([CLEAN])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"cut-cross-entropy==25.1.1", f"pytest=={pytest.__version__}"} <= set(asked)
    assert any(line.startswith("torch==") for line in asked) and not any("+" in line for line in asked)
    assert len({line.partition("==")[0] for line in asked}) == len(asked)
