"""Run tests/npu in a process with the host NPU."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_everything_in_tests_npu():
    command = "-m host_npu --devices 2 -m pytest -q -p no:cacheprovider tests/npu".split()
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
