"""The compiled parts under the sanitizers of the compiler: ``make asan``, ``make tsan``.

``asan`` compiles a copy of the repository with AddressSanitizer and UndefinedBehaviorSanitizer, so that the libraries
in use stay as they are, and runs the host NPU's C++ tests, ``tests/npu`` and the tests of ``csrc/cpu`` with it.
``tsan`` runs the C++ tests in eight threads on two devices under ThreadSanitizer.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_npu

from tests import _copy, _host_npu_program
from tests._copy import REPOSITORY

assert torch_aclnn_ops.__version__

ADDRESS, THREAD = "address,undefined", "thread"

_COPY = REPOSITORY / "build" / "asan"

# Python keeps memory until it ends; what the C++ tests lose is looked for.
_PYTHON_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# Measures the memory of the process, which AddressSanitizer keeps when it is freed.
_WITHOUT = ("tests/npu/test_leaks.py::test_many_calls_leave_nothing",)
_CPU_TESTS = tuple(
    f"tests/test_{name}.py"
    for name in ("linear_cross_entropy_compiled", "linear_cross_entropy_products", "native_functions")
)
# What is looked at in every step keeps the compiler from vectors: 1,001 numbers that are added one after the other have
# more roundings than the test allows. The second test runs the first one in another process.
_WITHOUT_VECTORS = tuple(
    f"{_CPU_TESTS[0]}::{name}"
    for name in (
        "test_the_softmax_is_exact_to_a_few_roundings[1001]",
        "test_all_of_this_holds_for_the_vectors_of_other_chips",
    )
)

# Cases that use a handle after its end on purpose, which by then may be another thread's, and why the others.
_REUSED = "uses a handle that was destroyed"
_ENVIRONMENT = "sets an environment variable"
ALONE = {
    "cache/determinism_is_part_of_the_key": "changes an option of the device, on which calls depend",
    "collective_failures/asked_for_by_a_test": "lets the next call of a function fail, whoever makes it",
    "communicators/a_thousand_leave_nothing": "counts what the process has open",
    "cores/threads_and_streams_have_the_limit_that_is_set": "changes a limit of the device",
    "life_cycle/destroying_executors": _REUSED,
    "life_cycle/phase_two_refusals_consume_the_executor": _REUSED,
    "life_cycle/tensors_outlive_phase_one": _REUSED,
    "objects/arrays_and_lists": _REUSED,
    "objects/tensors": _REUSED,
    "processes/a_limit_that_is_no_number": _ENVIRONMENT,
    "processes/a_rank_that_never_comes": _ENVIRONMENT,
    "sizes/every_row_of_a_copy_has_to_be_memory": "needs allocations that follow one another",
    "sizes/more_than_any_memory_has_is_not_allocated": "counts the device's free memory",
    "streams/a_failure_is_reported_by_whatever_waits_for_the_work": "another thread's synchronization would report it",
}


def program(kind: str, libraries: Path) -> Path:
    """Link the C++ tests with libraries that were compiled for a sanitizer, and return the program's path."""
    links = [*_host_npu_program.shared(libraries), f"-fsanitize={kind}"]
    (path,) = _host_npu_program.compiled(["g++"], _torch_npu.library().parents[1], [links])
    return path


def threads(test_program: Path, count: int) -> dict[str, list[str]]:
    """Run the C++ tests in threads on two devices; return what they said of each case."""
    names = [name for name in _host_npu_program.names() if name not in ALONE]
    command = [str(test_program), "--threads", str(count), *names]
    return _host_npu_program.results(command, [{"TORCH_ACLNN_HOST_NPU_DEVICES": "2"}], timeout=3600)


def _is_fine(what: str, said: dict[str, list[str]]) -> bool:
    ran = [(name, one) for name, each in said.items() for one in each]
    failed = [f"{name}: {one}" for name, one in ran if one != "ok"]
    print("\n".join(failed), end="\n" * bool(failed))
    print(f"{what}: {len(said)} cases, {len(ran) - len(failed)} runs passed and {len(failed)} failed", flush=True)
    return not failed and _host_npu_program.LAST in said


def _run_in_copy(environment: dict[str, str], *command: str) -> bool:
    """Run Python in the copy with the sanitizer's library in front of all others."""
    names = ("libasan.so", "libstdc++.so.6")  # which has to be there when the first exception is thrown
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    environment = environment | _PYTHON_OPTIONS | {"LD_PRELOAD": ":".join(found)}
    return subprocess.run([sys.executable, *command], cwd=_COPY, env=environment).returncode == 0


def check_addresses() -> bool:
    """Run ``make asan``; return whether nothing was reported."""
    environment = _copy.build(_COPY, ADDRESS) | {"TORCH_ACLNN_HOST_NPU_DEVICES": "2"}
    test_program = program(ADDRESS, _COPY / "torch_aclnn_ops" / "_host_npu")
    passed = [_is_fine("C++ tests", _host_npu_program.results([str(test_program)], timeout=3600))]
    pytest = ("-m", "pytest", "--quiet", "-p", "no:cacheprovider")
    without = [f"--deselect={name}" for name in (*_WITHOUT, *_WITHOUT_VECTORS)]
    passed.append(_run_in_copy(environment, "-m", "torch_aclnn_ops.host_npu", *pytest, "tests/npu", *without))
    passed.append(_run_in_copy(environment, *pytest, *_CPU_TESTS, *without))
    return all(passed)


def check_threads() -> bool:
    """Run ``make tsan``; return whether nothing was reported."""
    return _is_fine("C++ tests in 8 threads", threads(program(THREAD, _host_npu_program.instrumented(THREAD)), 8))


def main() -> int:
    """Run what the command line asks for; return 1 if something was reported."""
    checks = {"asan": check_addresses, "tsan": check_threads}
    parser = argparse.ArgumentParser(description="Run tests under the compiler's sanitizers.")
    parser.add_argument("check", choices=checks)
    if shutil.which("g++") is None:
        sys.exit("the sanitizers are those of GCC: apt-get install g++")
    passed = checks[parser.parse_args().check]()
    print("nothing reported" if passed else "REPORTED: see above")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
