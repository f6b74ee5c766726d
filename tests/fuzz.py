"""Random arguments for a given time, compared with torch: ``make fuzz``, or ``python -m tests.fuzz --seconds 600``.

The property tests run with new examples. Failed examples are kept in ``.fuzz`` and tried first next time.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import hypothesis
import pytest


class _Again:
    """Repeats the tests until the time is over or one fails."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.runs = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        end = time.monotonic() + self.seconds
        for item in itertools.cycle(session.items):
            if time.monotonic() > end or session.testsfailed:
                break
            self.runs += 1
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return True


def compare_with_torch(seconds: float) -> bool:
    """Run the property tests with new examples for a time, and return whether they passed."""
    again = _Again(seconds)
    options = ["--quiet", "-p", "no:cacheprovider", "-m", "hypothesis", "--hypothesis-profile=fuzz"]
    # Collecting all tests takes longer than finding these files.
    files = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py")) if "@given" in path.read_text()]
    status = pytest.main([*options, *files], [again])
    examples = again.runs * hypothesis.settings.get_profile("fuzz").max_examples
    print(f"property tests: {again.runs} runs of up to {examples} examples in all", flush=True)
    return status == pytest.ExitCode.OK


def main() -> int:
    """Run the selected fuzzers; return 1 if one of them found an error."""
    parser = argparse.ArgumentParser(description="Give calls random arguments for a time.")
    parser.add_argument("--seconds", type=float, default=60, help="default: 60")
    passed = compare_with_torch(parser.parse_args().seconds)
    print("nothing found" if passed else "FOUND: see above")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
