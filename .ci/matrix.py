"""Build and test the package with each supported version of torch: ``python .ci/matrix.py [VERSION ...]``.

Each version has its own environment, ``.matrix/<version>/venv``, with its torch_npu, and next to it a copy of the
sources, in which the compiled parts are built: the work tree does not change. Existing environments are used unchanged.
The result is ``.matrix/<version>/result.json``; the table of all results is printed and written to
``.matrix/table.md``.
"""

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import _copy

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / ".matrix"
# torch and the matching torch_npu. torch_npu requires builds of torch that are not available everywhere, so pip must
# not resolve its requirements.
_PAIRS = re.search(r"^PAIRS = (\{[^}]*\})", (ROOT / "torch_aclnn_ops/_installation.py").read_text(), re.MULTILINE)
PAIRS = ast.literal_eval(_PAIRS[1])
OF_TORCH_NPU = ["pyyaml", "numpy"]

FACTS = """
import importlib.metadata, json, torch
print(json.dumps({"torch": torch.__version__, "torch_npu": importlib.metadata.version("torch_npu"),
                  "instructions": torch.backends.cpu.get_cpu_capability()}))
"""


def make_environment(version: str) -> Path:
    """Return the Python of a version's environment, which is created if missing or incomplete."""
    python = MATRIX / version / "venv" / "bin" / "python"
    installed = MATRIX / version / "installed"
    if not installed.exists():
        run([sys.executable, "-m", "venv", str(python.parents[1])])
        tests = [each for extra in ("test", "examples", "lint") for each in requirements(extra)]
        tests += requirements("test", ROOT / "host-npu")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, f"torch=={version}", "setuptools>=77", "wheel", "ninja", *OF_TORCH_NPU, *tests])
        run([*pip, "--no-deps", f"torch_npu=={PAIRS[version]}"])
        installed.touch()
    return python


def requirements(extra: str, project: Path = ROOT) -> list[str]:
    """Return the requirements of an extra of a project."""
    text = (project / "pyproject.toml").read_text()
    [line] = [line for line in text.splitlines() if line.startswith(f"{extra} = [")]
    return json.loads(line.partition("=")[2])


def run(command: list[str], **options: object) -> None:
    """Run a command, which must succeed."""
    subprocess.run(command, check=True, **options)


def test(version: str, arguments: list[str]) -> None:
    """Build and test with one version, and record the result."""
    python, source = make_environment(version), MATRIX / version / "source"
    _copy.update(source)
    # An editable installation: programs that tests start find both projects, whatever their PYTHONPATH.
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    packages.joinpath("sources.pth").write_text(f"{source}\n{source / 'host-npu'}\n")
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_ACLNN_NPU": "1",
    }
    options = {"cwd": source, "env": environment}
    facts = json.loads(subprocess.check_output([str(python), "-c", FACTS], text=True, **options))
    facts["architecture"] = platform.machine()
    report = MATRIX / version / "report.xml"
    facts |= {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for project in (source / "host-npu", source):
        options["cwd"] = project
        with (MATRIX / version / "build.log").open("a") as log:
            command = [str(python), "setup.py", "--quiet", "build_ext", "--inplace"]
            built = subprocess.run(command, stdout=log, stderr=log, **options)
        if built.returncode:
            facts["failures"].append(f"{project.name}: the compiled parts do not build")
            continue
        report.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", "--quiet", "--numprocesses", "auto", f"--junitxml={report}"]
        subprocess.run([*command, *(arguments if project == source else [])], **options)
        for name, value in counts(report).items():
            facts[name] += value
    (MATRIX / version / "result.json").write_text(json.dumps(facts, indent=1) + "\n")


def counts(report: Path) -> dict[str, object]:
    """Return the numbers of passed, failed and skipped tests, and the names of the failed ones."""
    if not report.exists():
        return {"failures": ["the tests did not come to an end"]}
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite")).attrib
    total, skipped = int(suite["tests"]), int(suite["skipped"])
    failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in xml.etree.ElementTree.parse(report).iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {
        "passed": total - skipped - len(failures),
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }


def table() -> str:
    """Return the results of all tested versions as Markdown."""
    lines = [
        "| torch | torch_npu | instructions | architecture | passed | failed | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    for version in PAIRS:
        result = MATRIX / version / "result.json"
        if result.exists():
            facts = json.loads(result.read_text())
            cells = ("torch", "torch_npu", "instructions", "architecture", "passed", "failed", "skipped")
            lines.append(f"| {' | '.join(str(facts.get(cell, '-')) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Test the selected versions, by default all."""
    parser = argparse.ArgumentParser(description="Build and test the package with each version of torch.")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"among {', '.join(PAIRS)}; all without")
    parser.add_argument("--list", action="store_true", help="print the versions as JSON, and test nothing")
    parser.add_argument("--tests", nargs="+", default=[], help="arguments of pytest, such as tests/test_nn.py")
    arguments = parser.parse_args()
    for version in arguments.versions:
        if version not in PAIRS:
            parser.error(f"VERSION must be among {', '.join(PAIRS)}, but one is {version}")
    if arguments.list:
        print(json.dumps(list(PAIRS)))
        return 0
    versions = arguments.versions or list(PAIRS)
    for version in versions:
        test(version, arguments.tests)
    MATRIX.joinpath("table.md").write_text(table())
    print(table())
    results = [json.loads((MATRIX / version / "result.json").read_text()) for version in versions]
    for version, result in zip(versions, results, strict=True):
        for failure in result["failures"]:
            print(f"torch {version}: {failure}", file=sys.stderr)
    return 1 if any(result["failures"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
