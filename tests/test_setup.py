"""What setup.py compiles, and what it says of parts that it leaves out; ``make release-check`` builds and installs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Read by Python before anything else: the packages named are not installed for this process.
WITHOUT = "import os, sys\nsys.modules.update(dict.fromkeys(os.environ['WITHOUT'].split()))\n"
ISOLATED = "(pip sees what is installed with --no-build-isolation only)"


@pytest.mark.parametrize(
    ("without", "switches", "status", "said"),
    [
        ("", {"TORCH_ACLNN_NPU": "0"}, 0, "built without the NPU extension: TORCH_ACLNN_NPU=0"),
        ("torch_npu", {}, 0, f"built without the NPU extension: no torch_npu {ISOLATED}"),
        ("torch", {}, 0, f"built without the CPU kernels: no torch {ISOLATED}"),
        ("torch", {"TORCH_ACLNN_CPU": "1"}, 1, "TORCH_ACLNN_CPU=1 asks for the CPU kernels, but there is no torch"),
        ("", {"TORCH_ACLNN_CPU": "yes"}, 1, "TORCH_ACLNN_CPU must be 0, 1 or empty, but it is 'yes'"),
    ],
)
def test_a_part_that_is_left_out_is_named_with_the_reason(without, switches, status, said, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_ACLNN_")}
    environment = {**kept, **switches, "WITHOUT": without, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "setup.py", "--name"]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    assert f"torch_aclnn_ops: {said}" in result.stderr
