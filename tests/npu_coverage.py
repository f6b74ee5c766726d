"""Print which lines of csrc/npu the tests execute: ``make coverage``.

A copy of the repository is compiled for gcov, so that the libraries in use stay as they are.
"""

import gzip
import json
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
    """Return how often each line was executed, by file."""
    lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    objects = [str(path) for path in copy.glob("build/**/csrc/npu/*.gcda")]
    with tempfile.TemporaryDirectory() as results:
        subprocess.run(["gcov", "--json-format", *objects], cwd=results, check=True, capture_output=True)
        for result in Path(results).glob("*.json.gz"):
            for file in json.loads(gzip.decompress(result.read_bytes()))["files"]:
                path = Path(copy, file["file"])
                if "csrc/npu/" in str(path):
                    for line in file["lines"]:
                        lines[path.name][line["line_number"]] += line["count"]
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
