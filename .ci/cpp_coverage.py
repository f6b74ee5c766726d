"""Print which lines of csrc/npu and of the host NPU's csrc the tests execute: ``make coverage``.

A copy of the repository is compiled for gcov, so that the libraries in use stay as they are. What a process has
executed is written when it ends by itself: lines on the way to a crash that a test wants do not count.
"""

import itertools
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import _copy

# By folder of the project: what of its tests executes the compiled parts.
TESTS = {".": ("tests/test_npu.py",), "host-npu": ("tests",)}
FOLDERS = ("csrc/npu", "host-npu/csrc")

# How often each line was executed, by the path of the file.
Counts = dict[Path, dict[int, int]]


def main() -> int:
    """Compile, test, count; return 1 if a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        environment = _copy.build(copy, "coverage", TORCH_ACLNN_CPU="0")
        failed = 0
        for project, tests in TESTS.items():
            command = [sys.executable, "-m", "pytest", *tests, "-q", "-n", "auto", "-p", "no:cacheprovider"]
            failed |= subprocess.run(command, cwd=copy / project, env=environment).returncode
        # An object that was never loaded has notes, but no counts.
        counts = count(copy, copy.glob("**/build/**/*.gcno"))
    for name in FOLDERS:
        _print(Path(name), counts)
    return failed


def count(copy: Path, notes: Iterable[Path]) -> Counts:
    """Return what gcov has counted in the objects whose notes (``.gcno``) these are.

    gcov writes "=====" for a line of which only the clean-up after an exception is left of the compiler's work, such as
    the return of a value that is made in its place. Such lines do not count.
    """
    counts: Counts = defaultdict(dict)
    command = ["gcov", "--stdout", "--relative-only", "--source-prefix", str(copy), *map(str, notes)]
    listing = subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True).stdout
    lines: dict[int, int] = {}
    for line in listing.splitlines():
        count, _, rest = line.partition(":")
        number, _, source = rest.partition(":")
        if source.startswith("Source:"):
            lines = counts[Path(source.removeprefix("Source:"))]
        elif count.strip() not in ("-", "=====") and number.strip().isdigit():
            executed = 0 if count.strip() == "#####" else int(count.strip().rstrip("*"))
            lines[int(number)] = max(lines.get(int(number), 0), executed)
    return counts


def _print(folder: Path, counts: Counts) -> None:
    executed = total = 0
    for file, lines in sorted(counts.items()):
        if not file.is_relative_to(folder) or not lines:
            continue
        missed = sorted(number for number, count in lines.items() if count == 0)
        executed, total = executed + len(lines) - len(missed), total + len(lines)
        note = f"   not {', '.join(_ranges(missed))}" if missed else ""
        print(f"{file.relative_to(folder)!s:<44} {len(lines) - len(missed):>4} of {len(lines):>4} lines{note}")
    print(f"{folder!s:<44} {executed:>4} of {total:>4} lines, {100 * executed / total:.1f} %\n")


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Return increasing numbers as text, those that follow one another as one range."""
    ranges = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *others = (number for _, number in group)
        ranges.append(f"{first}-{others[-1]}" if others else f"{first}")
    return ranges


if __name__ == "__main__":
    sys.exit(main())
