"""Which tests execute a line of the package or of its C++: measured for ``mutants.py``.

Each test file runs in a process of its own, in a copy of the repository that is compiled for gcov. coverage.py notes
the test with every line, also in the processes that a test starts; gcov knows only the file. The hooks are those of a
pytest plugin, which tells coverage.py which test runs.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import _copy
import coverage
import cpp_coverage
import pytest

PACKAGE = "torch_aclnn_ops"
# A test that takes longer is not used, nor are tests of a file that has taken longer when they would start.
TEST_SECONDS, FILE_SECONDS = 40, 400

_SETTINGS = """[run]
include = ${COVERING_INCLUDE}
data_file = ${COVERING_FOLDER}/lines
context = ${COVERING_TEST}
parallel = true
patch = _exit, fork
"""


def command(on_npu: bool, arguments: Iterable[str]) -> list[str]:
    """Return the command that runs tests, on the host NPU if they need an NPU."""
    host_npu = ["-m", "host_npu"] if on_npu else []
    return [sys.executable, *host_npu, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]


def is_on_npu(test: str) -> bool:
    """Tell whether a test needs an NPU, by its file's folder."""
    return test.startswith("tests/npu/")


# The plugin. Seconds are those of the processor, which are the same on a busy machine.

_outcomes: list[str] = []


def _used() -> float:
    return sum(os.times()[:4])


def _too_long(*_: object) -> None:
    raise TimeoutError(f"longer than {10 * TEST_SECONDS} seconds")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let coverage.py name the test with the lines of this process and of those that it starts."""
    measuring = coverage.Coverage.current()
    assert measuring is not None
    measuring.switch_context(item.nodeid)
    os.environ["COVERING_TEST"] = item.nodeid
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(10 * TEST_SECONDS)
    _outcomes.clear()
    before = _used()
    try:
        return (yield)
    finally:
        signal.alarm(0)
        os.environ["COVERING_TEST"] = ""
        measuring.switch_context("")
        if set(_outcomes) == {"passed"} and _used() - before <= TEST_SECONDS:
            with open(Path(os.environ["COVERING_FOLDER"]) / "passed", "a") as file:
                print(json.dumps([item.nodeid, _used() - before]), file=file)
        if _used() > FILE_SECONDS:
            item.session.shouldstop = f"longer than {FILE_SECONDS} seconds"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of each part of a test."""
    _outcomes.append(report.outcome)


# The measurement.


@dataclass(eq=False)
class Measured:
    """What a test file, or the package's doctests, executed.

    Attributes:
        file: The test file, or the package's folder.
        folder: Where everything is that was measured.
        seconds: How long the tests took, but those that did not pass.
        native: How often each line of C++ was executed, by the path of the source.
    """

    file: Path
    folder: Path
    seconds: dict[str, float]
    native: dict[str, dict[int, int]]

    @functools.cache  # noqa: B019  (there are as many as test files)
    def tests(self, source: Path) -> dict[int, list[str]]:
        """Return the tests that execute each line of a source of Python; "" is the import."""
        data = coverage.CoverageData(str(self.folder / "lines"))
        data.read()
        return data.contexts_by_lineno(str(source))


def measure(copy: Path, jobs: int) -> list[Measured]:
    """Run each test file once, in a copy of the repository, and return what was measured.

    What was measured before is taken again while the package, the C++ and the test file are the same.
    """
    environment = _copy.build(copy, "coverage", projects=(".",))
    # Its plugin is this module.
    environment["PYTHONPATH"] += os.pathsep + str(copy / ".ci")
    files = sorted(
        path.relative_to(copy) for path in [*copy.glob("tests/test_*.py"), *copy.glob("tests/npu/test_*.py")]
    )
    sources = hashlib.sha256()
    for path in sorted([*copy.glob(f"{PACKAGE}/**/*.py"), *copy.glob("csrc/**/*.*")]):
        sources.update(path.read_bytes())

    def one(file: Path) -> Measured:
        tested = b"" if file.is_absolute() or (copy / file).is_dir() else (copy / file).read_bytes()
        digest = hashlib.sha256(sources.digest() + tested).hexdigest()
        return _measure_file(copy, file, digest, environment)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, [Path(PACKAGE), *files]))


def _measure_file(copy: Path, file: Path, digest: str, environment: dict[str, str]) -> Measured:
    folder = copy.parent / "lines" / str(file).replace("/", "-")
    done = folder / "measured.json"
    if not done.exists() or json.loads(done.read_text())[0] != digest:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "settings").write_text(_SETTINGS)
        settings = {
            "COVERAGE_PROCESS_START": str(folder / "settings"),
            "COVERING_INCLUDE": str(copy / PACKAGE / "*"),
            "COVERING_FOLDER": str(folder),
            "COVERING_TEST": "",
            "GCOV_PREFIX": str(folder / "native"),
        }
        began = time.monotonic()
        with open(folder / "output", "w") as output:
            arguments = ["-p", "_covering", str(file)]
            run = command(is_on_npu(str(file)), arguments)
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    run,
                    cwd=copy,
                    env=environment | settings,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # Tests that interrupt a call anywhere can interrupt coverage.py with a lock in its hands.
                    timeout=3 * FILE_SECONDS,
                )
        coverage.Coverage(str(folder / "lines")).combine([str(folder)])
        native = _native(copy, folder / "native")
        passed = folder / "passed"
        seconds = dict(map(json.loads, passed.read_text().splitlines())) if passed.exists() else {}
        print(f"{file}: {len(seconds)} tests passed, {time.monotonic() - began:.0f} s", flush=True)
        done.write_text(
            json.dumps([digest, seconds, {str(path): list(lines.items()) for path, lines in native.items()}])
        )
    _, seconds, lines_of = json.loads(done.read_text())
    return Measured(file, folder, seconds, {path: dict(lines) for path, lines in lines_of.items()})


def _native(copy: Path, prefix: Path) -> cpp_coverage.Counts:
    """Return how often the processes that wrote their counts below ``prefix`` executed each line of C++."""
    counted = prefix / copy.relative_to("/")
    notes = [counts.with_suffix(".gcno") for counts in counted.glob("build/**/*.gcda")]
    for path in notes:
        shutil.copy2(copy / path.relative_to(counted), path)
    return cpp_coverage.count(copy, notes) if notes else {}
