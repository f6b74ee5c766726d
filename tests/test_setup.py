"""What setup.py compiles, and what it says of parts that it leaves out; ``make release-check`` builds and installs."""

import os
import runpy
import sys
from pathlib import Path

import pytest
from host_npu.testing import outcomes

ROOT = Path(__file__).resolve().parents[1]
ISOLATED = "(pip sees what is installed with --no-build-isolation only)"


def name_of_the_package(device, without):
    """Run setup.py in a process for which packages are not installed; return with what it exits."""
    with pytest.MonkeyPatch.context() as patch:
        for package in without.split():
            patch.setitem(sys.modules, package, None)
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["setup.py", "--name"])
        try:
            runpy.run_path("setup.py", run_name="__main__")
        except SystemExit as end:
            return end.code
    return None


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
def test_a_part_that_is_left_out_is_named_with_the_reason(without, switches, status, said):
    given = {name: "" for name in os.environ if name.startswith("TORCH_ACLNN_")} | switches
    [outcome] = outcomes(name_of_the_package, 1, without, backend="", environment=given)
    assert outcome.error is None, outcome.error
    assert bool(outcome.value) == bool(status), outcome.output
    assert f"torch_aclnn_ops: {said}" in outcome.output + str(outcome.value)
