"""Run a checkout of other people's tests on the host NPU: ``python -m tests.third_party FOLDER``.

Each test file runs in its own process, in its folder, with a time limit. A table shows the results of the tests: a
refusal is a failure with a message of the host NPU about a function or argument that it does not simulate. Other
people's tests are not in this repository; those of torch_npu and op-plugin are in the folders ``test`` of their
repositories.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

# A refusal of a function or of an argument.
_REFUSAL = re.compile(r"the host NPU does not simulate (?P<function>[^;\n]+)|(?P<argument>aclnn\w+): the host NPU ")


@dataclass
class Result:
    """The results of the tests of a file."""

    file: str
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    # The number of failed tests, by the names of the refused operators.
    refused: dict[str, int] = field(default_factory=dict)
    # How the process ended, if it did not write its report.
    ended: str = ""


def run(file: Path, folder: Path, seconds: float, options: Iterable[str] = ()) -> Result:
    """Run the tests of a file.

    Args:
        file: A file with tests that pytest can collect, including ``unittest``.
        folder: The checkout; the result names the file relative to it.
        seconds: The time limit.
        options: Further options of ``python -m host_npu``.
    """
    result = Result(str(file.relative_to(folder)))
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        command = [sys.executable, "-m", "host_npu", *options, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--rootdir={folder}", f"--junitxml={report}", str(file.resolve())]
        environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        try:
            done = subprocess.run(
                command, cwd=file.parent, env=environment, timeout=seconds, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            result.ended = f"after {seconds:g} s"
            return result
        if not report.exists():
            result.ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
            return result
        _count(result, report)
    return result


def _count(result: Result, report: Path) -> None:
    refused: collections.Counter[str] = collections.Counter()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if problem is not None:
            name = _REFUSAL.search(f"{problem.get('message')}\n{problem.text}")
            if name is None:
                result.failed += 1
            else:
                refused[name["function"] or name["argument"]] += 1
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    result.refused = dict(refused.most_common())


def table(results: Iterable[Result]) -> str:
    """Return the results as a Markdown table, with their sums in the last row."""
    rows = ["| file | passed | refused | failed | skipped | |", "|---|---|---|---|---|---|"]
    total = Result("**all**")
    for result in results:
        refused = sum(result.refused.values())
        names = result.ended or ", ".join(result.refused)
        rows.append(f"| {result.file} | {result.passed} | {refused} | {result.failed} | {result.skipped} | {names} |")
        for name in ("passed", "failed", "skipped"):
            setattr(total, name, getattr(total, name) + getattr(result, name))
        total.refused[""] = total.refused.get("", 0) + refused
        total.ended = str(int(total.ended or 0) + bool(result.ended))
    refused = total.refused.get("", 0)
    rows.append(
        f"| {total.file} | {total.passed} | {refused} | {total.failed} | {total.skipped} | {total.ended or 0} ended |"
    )
    return "\n".join(rows)


def main() -> int:
    """Run the tests that the command line names; return 1 if a process ended before its tests did."""
    parser = argparse.ArgumentParser(prog="python -m tests.third_party", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the checkout, or a folder of it")
    parser.add_argument("--pattern", default="test_*.py", help="which files (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a file (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files at once (default: one for each core)")
    parser.add_argument("--soc", help="the simulated chip, as python -m host_npu takes it")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob(arguments.pattern))
    if not files:
        parser.error(f"{arguments.folder} has no files {arguments.pattern}")
    options = ["--soc", arguments.soc] if arguments.soc else []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda file: run(file, arguments.folder, arguments.seconds, options), files))
    print(table(results))
    return int(any(result.ended for result in results))


if __name__ == "__main__":
    sys.exit(main())
