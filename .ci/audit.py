"""Look for known vulnerabilities in what is installed and pinned: ``python .ci/audit.py .audit/bin/pip-audit``.

Checked is what is installed beside this Python, and every version that pyproject.toml and .ci/requirements.txt pin. The
exit status is 0 if nothing is known, 1 if something is, and 2 if it could not be found out, because the database cannot
be reached or does not have a package: pip-audit itself takes the latter for success.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = "torch_aclnn_ops"


def requirements() -> list[str]:
    """Return each package with its version, the pinned one where there is one."""
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / ".ci" / "requirements.txt").read_text(), re.MULTILINE))
    pinned |= re.findall(r'"([\w.-]+)==([\w.]+)"', (ROOT / "pyproject.toml").read_text())
    # What a version has behind a plus is no part of the release.
    versions = {_normal(name): version.partition("+")[0] for name, version in [*installed.items(), *pinned.items()]}
    versions.pop(_normal(OWN), None)
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(tool: str) -> int:
    """Print what is known of each package; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requirements.txt")
        file.write_text("\n".join(requirements()))
        command = [tool, "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "-r", str(file)]
        result = subprocess.run(command, capture_output=True, text=True)
    try:
        packages = json.loads(result.stdout)["dependencies"]
    except ValueError:
        print(f"not checked: {(result.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return 2
    known = [(package, flaw) for package in packages for flaw in package.get("vulns", [])]
    unknown = [package for package in packages if "skip_reason" in package]
    for package, flaw in known:
        remedy = f"fixed in {', '.join(flaw['fix_versions'])}" if flaw["fix_versions"] else "no version without it"
        print(f"{package['name']} {package['version']}: {flaw['id']}, {remedy}")
    for package in unknown:
        print(f"not checked: {package['skip_reason']}")
    checked = len(packages) - len(unknown)
    print(f"{checked} packages checked, {len(known)} known vulnerabilities, {len(unknown)} packages not checked")
    return 1 if known else 2 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
