"""Print which lines of csrc/npu the tests execute: ``make coverage``.

A copy of the repository is compiled for gcov, so that the libraries in use stay as they are.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("csrc", "examples", "tests", "torch_aclnn_ops", "pyproject.toml", "setup.py", "LICENSE", "README.md")


def main() -> int:
    """Compile, test, count; return 1 if a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        copy.mkdir()
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "_C*.so"))
            elif (ROOT / part).exists():
                shutil.copy(ROOT / part, copy / part)
        environment = {**os.environ, "PYTHONPATH": str(copy), "TORCH_ACLNN_COVERAGE": "1", "TORCH_ACLNN_HOST_NPU": "0"}

        def run(*command: str) -> int:
            return subprocess.run(command, cwd=copy, env=environment).returncode

        if run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace") != 0:
            return 1
        failed = run(sys.executable, "-m", "pytest", "tests/test_npu.py", "-q", "-p", "no:cacheprovider")
        _print(_count(copy))
        return failed


def _count(copy: Path) -> dict[str, dict[int, int]]:
    """Return how often each line was executed, by file.

    gcov writes "=====" for a line of which only the clean-up after an exception is left of the compiler's work, such as
    the return of a value that is made in its place. Such lines do not count.
    """
    lines: dict[str, dict[int, int]] = defaultdict(dict)
    objects = [str(path) for path in copy.glob("build/**/_C.gcda")]
    listing = subprocess.run(
        ["gcov", "--stdout", *objects], cwd=copy, check=True, capture_output=True, text=True
    ).stdout
    path = Path()
    for line in listing.splitlines():
        count, _, rest = line.partition(":")
        number, _, source = rest.partition(":")
        if source.startswith("Source:"):
            path = Path(copy, source.removeprefix("Source:"))
        elif path.parent.match("csrc/npu") and count.strip() not in ("-", "=====") and number.strip().isdigit():
            executed = 0 if count.strip() == "#####" else int(count.strip().rstrip("*"))
            counts = lines[path.name]
            counts[int(number)] = max(counts.get(int(number), 0), executed)
    return lines


def _print(lines: dict[str, dict[int, int]]) -> None:
    executed = total = 0
    for file, counts in sorted(lines.items()):
        missed = [number for number, count in sorted(counts.items()) if count == 0]
        executed, total = executed + len(counts) - len(missed), total + len(counts)
        note = f"   not {', '.join(map(str, missed))}" if missed else ""
        print(f"{file:<28} {len(counts) - len(missed):>4} of {len(counts):>4} lines{note}")
    print(f"{'csrc/npu':<28} {executed:>4} of {total:>4} lines, {100 * executed / total:.1f} %")


if __name__ == "__main__":
    sys.exit(main())
