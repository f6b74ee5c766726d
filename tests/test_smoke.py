"""tests/smoke.py, which is for other machines, on this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_npu import _libraries

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_every_feature_works_once(device):
    if device == "npu" and _libraries.missing():
        pytest.skip("the host NPU is not built")
    runner = ["-m", "host_npu"] if device == "npu" else []
    result = subprocess.run(
        [sys.executable, *runner, "tests/smoke.py", device],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
