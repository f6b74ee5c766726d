"""Can the tests fail? Mutation testing of the package and of its C++: ``make mutants``.

Each mutant is a small change of one line, made in a copy of the repository. It is judged by tests that execute the
line; one that no test notices survives, and is either a gap in the tests or equivalent to the program. The latter are
listed in ``equivalent_mutants.yaml`` with the reason.
"""

import argparse
import collections
import dataclasses
import itertools
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _copy
import _covering
import _mutations
import yaml
from _copy import REPOSITORY
from _covering import PACKAGE, Measured
from _mutations import Mutant

EQUIVALENT = REPOSITORY / ".ci" / "equivalent_mutants.yaml"
FOLDER = REPOSITORY / "build" / "mutants"
CPP = ("csrc/npu", "csrc/cpu", "csrc/autograd")
JOBS = 2
# How long the tests of a mutant took when they were measured, and what they may take more with a mutant.
SECONDS, PATIENCE = 60.0, 180.0
KILLED_SHARE = 0.95
# Judged first, with nothing changed: these have to survive.
CONTROLS = 4


def tests_of(mutant: Mutant, measured: list[Measured]) -> dict[str, float]:
    """Return tests that execute the changed line, with their seconds: some of each test function."""
    found: dict[str, float] = {}
    for each in measured:
        tests = _tests_of_python(mutant, each) if mutant.path.suffix == ".py" else _tests_of_cpp(mutant, each)
        found.update({test: each.seconds[test] for test in tests if test in each.seconds})
    return _spread(found, mutant.path.stem)


def _tests_of_python(mutant: Mutant, measured: Measured) -> set[str]:
    lines = measured.tests(FOLDER / "measured" / mutant.path)
    tests = set(lines.get(mutant.line, ()))
    # What runs during the import belongs to whoever uses the module.
    return tests - {""} or set(itertools.chain(*lines.values())) if "" in tests else tests


def _tests_of_cpp(mutant: Mutant, measured: Measured) -> Iterable[str]:
    # A test that compiles a source by itself names it.
    names_it = measured.file.suffix == ".py" and mutant.path.name in (REPOSITORY / measured.file).read_text()
    lines = measured.native.get(str(mutant.path), {})
    # The other lines of a statement are none of gcov's.
    statement = max((line for line in lines if line <= mutant.line), default=None)
    return measured.seconds if names_it or statement is not None and lines[statement] > 0 else ()


def _spread(tests: dict[str, float], stem: str) -> dict[str, float]:
    """Return tests of ``SECONDS``: one of each function, then others; first those that have the source's name."""
    functions = collections.defaultdict(list)
    for test in sorted(tests, key=lambda test: tests[test]):
        functions[test.partition("[")[0]].append(test)
    ordered = sorted(functions, key=lambda name: (stem.strip("_") not in name, tests[functions[name][0]]))
    chosen: dict[str, float] = {}
    for turn in itertools.zip_longest(*(functions[name] for name in ordered)):
        for test in turn:
            if test is not None and sum(chosen.values()) + tests[test] <= SECONDS:
                chosen[test] = tests[test]
    return chosen


@dataclasses.dataclass
class Verdict:
    """What became of a mutant: "killed", "survived", "equivalent" or "invalid", and why."""

    mutant: Mutant
    what: str
    why: str = ""


class Worker:
    """A copy of the repository in which mutants are made, one after the other."""

    def __init__(self, number: int) -> None:
        self.copy = FOLDER / f"copy{number}"
        self._built: list[bytes] = []
        # The objects of the last run may be a mutant's.
        shutil.rmtree(self.copy, ignore_errors=True)
        _copy.update(self.copy)
        for built in (REPOSITORY / PACKAGE).glob("*.so"):
            shutil.copy2(built, self.copy / PACKAGE)
        self.environment = {**os.environ, "PYTHONPATH": str(self.copy), "PYTHONDONTWRITEBYTECODE": "1"}

    def judge(self, mutant: Mutant, measured: list[Measured]) -> Verdict:
        """Make the mutant, run its tests, and take it back."""
        path = self.copy / mutant.path
        original = path.read_text()
        is_cpp = path.suffix != ".py"
        if is_cpp and not self._built:
            self._built = self._compile() or sys.exit(f"{self.copy} cannot be compiled")
        path.write_text(mutant.source)
        try:
            compiled = self._compile() if is_cpp else []
            if is_cpp and not compiled:
                return Verdict(mutant, "invalid", "it cannot be compiled")
            if is_cpp and compiled == self._built:
                return Verdict(mutant, "equivalent", "it is compiled to the same code")
            tests = tests_of(mutant, measured)
            return self._test(mutant, tests) if tests else Verdict(mutant, "survived", "no test executes the line")
        finally:
            path.write_text(original)

    def _compile(self) -> list[bytes]:
        """Compile what has changed, and return the extensions; none if that is not possible."""
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        switches = {"TORCH_ACLNN_NPU": "1", "TORCH_ACLNN_CPU": "1"}
        if subprocess.run(command, cwd=self.copy, env=self.environment | switches, **_QUIET).returncode != 0:
            return []
        return [built.read_bytes() for built in sorted((self.copy / PACKAGE).glob("*.so"))]

    def _test(self, mutant: Mutant, tests: dict[str, float]) -> Verdict:
        for on_npu in (False, True):
            here = [test for test in tests if _covering.is_on_npu(test) == on_npu]
            if not here:
                continue
            (self.copy / "tests.txt").write_text("\n".join(here))
            patience = PATIENCE + 3 * sum(tests[test] for test in here)
            command = _covering.command(on_npu, ["-x", "--tb=line", "@tests.txt"])
            status, said = _run(command, self.copy, self.environment, patience)
            if status != 0:
                return Verdict(mutant, "killed", said)
        return Verdict(mutant, "survived", f"{len(tests)} tests passed, such as {next(iter(tests))}")


_QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def _run(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Run tests; return the status, ``None`` after too long, and the line that says which test failed."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"no end after {seconds:.0f} s"
    finally:
        # Also what the tests have started and the mutant has not ended.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    lines = output.decode(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.returncode, (failed or lines or ["nothing said"])[0 if failed else -1]


class Judge:
    """Judges mutants in parallel, each in the copy of a worker."""

    def __init__(self) -> None:
        self._equivalent = read_equivalent()
        self._measured = _covering.measure(FOLDER / "measured", JOBS)
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for number in range(JOBS):
            self._workers.put(Worker(number))

    def verdicts(self, mutants: Iterator[Mutant], count: int | None) -> list[Verdict]:
        """Judge the first ``count`` mutants that can be compiled, or all of them."""
        found: list[Verdict] = []
        with ThreadPoolExecutor(JOBS) as pool:
            while batch := list(itertools.islice(mutants, count and count - len(found))):
                found += [verdict for verdict in pool.map(self._verdict, batch) if verdict.what != "invalid"]
        return found

    def _verdict(self, mutant: Mutant) -> Verdict:
        if (str(mutant.path), mutant.before, mutant.after) in self._equivalent:
            return Verdict(mutant, "equivalent")
        began = time.monotonic()
        worker = self._workers.get()
        try:
            verdict = worker.judge(mutant, self._measured)
        finally:
            self._workers.put(worker)
        print(f"{verdict.what}: {mutant}\n    {verdict.why} ({time.monotonic() - began:.0f} s)", flush=True)
        return verdict


def read_equivalent() -> set[tuple[str, str, str]]:
    """Return the mutants that are listed as equivalent; each has to be of a line that is there, and have a reason."""
    listed = yaml.safe_load(EQUIVALENT.read_text())
    for each in listed:
        lines = (REPOSITORY / each["file"]).read_text().splitlines()
        if each["line"] not in map(str.strip, lines) or not each["reason"].strip():
            sys.exit(f"{EQUIVALENT.name}: there is no such line in {each['file']}, or no reason: {each['line']}")
    return {(each["file"], each["line"], each["mutant"]) for each in listed}


def summary(what: str, verdicts: list[Verdict]) -> bool:
    """Print the figures and the survivors; return whether enough were killed."""
    counts = collections.Counter(verdict.what for verdict in verdicts)
    others = len(verdicts) - counts["equivalent"]
    share = counts["killed"] / max(others, 1)
    figures = ", ".join(f"{counts[name]} {name}" for name in ("killed", "equivalent", "survived"))
    print(f"\n{what}: {len(verdicts)} mutants, {figures}; killed of those that are not equivalent: {100 * share:.1f} %")
    for verdict in verdicts:
        if verdict.what == "survived":
            print(f"survived: {verdict.mutant}\n    {verdict.why}")
    return share >= KILLED_SHARE


def main() -> int:
    """Run the mutation tests; return 1 if too many mutants survived."""
    parser = argparse.ArgumentParser(description="Mutation testing of the package and of its C++.")
    parser.add_argument("--seed", type=int, default=1, help="which mutants")
    parser.add_argument("--python", type=int, default=150, metavar="N", help="how many of the package")
    parser.add_argument(
        "--cpp", type=int, default=40, metavar="N", help="how many of csrc/npu, csrc/cpu, csrc/autograd"
    )
    parser.add_argument(
        "--skip", type=int, nargs=2, default=(0, 0), metavar="N", help="how many of each another run has judged"
    )
    parser.add_argument("--every", action="store_true", help="every mutant, which takes days")
    arguments = parser.parse_args()
    python = _sources(PACKAGE, "*.py")
    cpp = [path for folder in CPP for path in _sources(folder, "*.[ch]*")]
    of_python = itertools.islice(_mutations.python(REPOSITORY, python, arguments.seed), arguments.skip[0], None)
    of_cpp = itertools.islice(_mutations.cpp(REPOSITORY, cpp, arguments.seed), arguments.skip[1], None)
    judge = Judge()

    first = list(itertools.islice(of_python, CONTROLS))
    if any(verdict.what != "survived" for verdict in judge.verdicts(map(_unchanged, first), CONTROLS)):
        sys.exit("tests fail although nothing has changed: see above")
    is_enough = [
        summary(what, judge.verdicts(mutants, None if arguments.every else count))
        for what, mutants, count in (
            ("Python", itertools.chain(first, of_python), arguments.python),
            ("C++", of_cpp, arguments.cpp),
        )
    ]
    return 0 if all(is_enough) else 1


def _unchanged(mutant: Mutant) -> Mutant:
    return dataclasses.replace(mutant, after=mutant.before, source=(REPOSITORY / mutant.path).read_text())


def _sources(folder: str, pattern: str) -> list[Path]:
    return sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob(pattern))


if __name__ == "__main__":
    sys.exit(main())
