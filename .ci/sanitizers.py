"""The compiled parts under AddressSanitizer and UndefinedBehaviorSanitizer: ``make asan``.

A copy of the repository is compiled, so that the installed libraries do not change, and ``tests/npu`` and the tests of
``csrc/cpu`` run with it.
"""

import shutil
import subprocess
import sys

import _copy
from _copy import REPOSITORY

_COPY = REPOSITORY / "build" / "asan"

# Python keeps memory until it exits, so only the C++ tests detect leaks.
_PYTHON_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# Measures the memory of the process, which AddressSanitizer keeps after a free.
_WITHOUT = ("tests/npu/test_leaks.py::test_many_calls_leak_nothing",)
_CPU_TESTS = (
    "tests/test_linear_cross_entropy_products.py",
    "tests/test_native_functions.py",
    "tests/test_optim_flat.py",
)


def _run_in_copy(environment: dict[str, str], *command: str) -> bool:
    """Run Python in the copy with the sanitizer's library preloaded."""
    names = ("libasan.so", "libstdc++.so.6")  # libstdc++ must be loaded before the first exception
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    environment = environment | _PYTHON_OPTIONS | {"LD_PRELOAD": ":".join(found)}
    return subprocess.run([sys.executable, *command], cwd=_COPY, env=environment).returncode == 0


def check_addresses() -> bool:
    """Return whether nothing was reported."""
    environment = _copy.build(_COPY, "address,undefined") | {"HOST_NPU_DEVICES": "2"}
    pytest = ("-m", "pytest", "--quiet", "-p", "no:cacheprovider")
    without = [f"--deselect={name}" for name in _WITHOUT]
    passed = [
        _run_in_copy(environment, "-m", "host_npu", *pytest, "tests/npu", *without),
        _run_in_copy(environment, *pytest, *_CPU_TESTS, *without),
    ]
    return all(passed)


def main() -> int:
    """Compile and test; return 1 if something was reported."""
    if shutil.which("g++") is None:
        sys.exit("the sanitizers are those of GCC: apt-get install g++")
    passed = check_addresses()
    print("nothing reported" if passed else "REPORTED: see above")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
