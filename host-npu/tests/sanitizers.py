"""The C++ tests under the sanitizers of the compiler: ``make asan``, ``make tsan``.

``asan`` runs them under AddressSanitizer and UndefinedBehaviorSanitizer; ``tsan`` runs them under ThreadSanitizer, in
eight threads on two devices.
"""

import argparse
import shutil
import sys
from pathlib import Path

from tests import _c_program

ADDRESS, THREAD = "address,undefined", "thread"

# Cases that cannot run in several threads, and why. A destroyed handle may have been reused by another thread.
_REUSED = "uses a handle that was destroyed"
_REPORTED = "another thread's synchronization would report it"
_REALLOCATED = "needs freed memory that no other thread allocates"
ALONE = {
    "cache/determinism_is_part_of_the_key": "changes an option of the device, on which calls depend",
    "communicators/a_limit_that_is_no_number": "sets an environment variable",
    "cores/threads_and_streams_have_the_limit_that_is_set": "changes a limit of the device",
    "graphs/a_mode_says_which_threads_may_copy": "a capture refuses the copies of other threads",
    "graphs/a_replay_of_memory_that_is_gone_is_a_fault": _REALLOCATED,
    "life_cycle/destroying_executors": _REUSED,
    "life_cycle/phase_one_refuses_destroyed_tensors": _REUSED,
    "life_cycle/phase_two_refusals_consume_the_executor": _REUSED,
    "life_cycle/tensors_outlive_phase_one": _REUSED,
    "objects/arrays_and_lists": _REUSED,
    "objects/tensors": _REUSED,
    "sizes/every_row_of_a_copy_has_to_be_memory": "needs allocations that follow one another",
    "sizes/more_than_any_memory_has_is_not_allocated": "counts the device's free memory",
    "streams/a_failure_is_reported_by_whatever_waits_for_the_work": _REPORTED,
    "streams/a_failure_that_was_reported_is_not_passed_on": _REPORTED,
}


def program(kind: str, libraries: Path) -> Path:
    """Link the C++ tests with libraries compiled for a sanitizer, and return the program's path."""
    links = [*_c_program.shared(libraries), f"-fsanitize={kind}"]
    (path,) = _c_program.compiled(["g++"], [links])
    return path


def threads(test_program: Path, count: int) -> dict[str, list[str]]:
    """Run the C++ tests in threads on two devices and return the results of each case."""
    names = [name for name in _c_program.names() if name not in ALONE]
    command = [str(test_program), "--threads", str(count), *names]
    return _c_program.results(command, [{"HOST_NPU_DEVICES": "2"}], timeout=3600)


def _is_fine(what: str, said: dict[str, list[str]]) -> bool:
    ran = [(name, one) for name, each in said.items() for one in each]
    failed = [f"{name}: {one}" for name, one in ran if one != "ok"]
    print("\n".join(failed), end="\n" * bool(failed))
    print(f"{what}: {len(said)} cases, {len(ran) - len(failed)} runs passed and {len(failed)} failed", flush=True)
    return not failed and _c_program.LAST in said


def check_addresses() -> bool:
    """Run ``make asan``; return whether nothing was reported."""
    test_program = program(ADDRESS, _c_program.instrumented(ADDRESS))
    return _is_fine("C++ tests", _c_program.results([str(test_program)], timeout=3600))


def check_threads() -> bool:
    """Run ``make tsan``; return whether nothing was reported."""
    return _is_fine("C++ tests in 8 threads", threads(program(THREAD, _c_program.instrumented(THREAD)), 8))


def main() -> int:
    """Run as the command line requests; return 1 if something was reported."""
    checks = {"asan": check_addresses, "tsan": check_threads}
    parser = argparse.ArgumentParser(description="Run the C++ tests under the compiler's sanitizers.")
    parser.add_argument("check", choices=checks)
    if shutil.which("g++") is None:
        sys.exit("the sanitizers are those of GCC: apt-get install g++")
    passed = checks[parser.parse_args().check]()
    print("nothing reported" if passed else "REPORTED: see above")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
