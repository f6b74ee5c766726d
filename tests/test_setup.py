"""The switches of setup.py, which decide what is compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import platform, runpy, sys
platform.machine = lambda: {machine!r}
sys.argv = ["setup.py", "--name"]
runpy.run_path({path!r}, run_name="__main__")
"""


def _set_up(machine: str, **switches: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py as if on another machine; its other parts are left out."""
    environment = {**os.environ, "TORCH_ACLNN_NPU": "0", "TORCH_ACLNN_HOST_NPU": "0", **switches}
    code = CODE.format(machine=machine, path=str(ROOT / "setup.py"))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize(
    ("machine", "choice", "said"),
    [
        ("x86_64", "", None),
        ("x86_64", "1", None),
        ("x86_64", "0", "built without the extension for CPUs: TORCH_ACLNN_CPU=0"),
        ("aarch64", "", "built without the extension for CPUs: no x86_64 CPU (this one is aarch64)"),
        ("aarch64", "0", "built without the extension for CPUs: TORCH_ACLNN_CPU=0"),
    ],
)
def test_the_part_for_cpus_is_built_on_x86_unless_it_is_switched_off(machine, choice, said):
    result = _set_up(machine, TORCH_ACLNN_CPU=choice)
    assert result.returncode == 0
    assert [line for line in result.stderr.splitlines() if "CPU" in line] == (
        [f"torch_aclnn_ops: {said}"] if said else []
    )


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        (
            {"TORCH_ACLNN_CPU": "1"},
            "TORCH_ACLNN_CPU=1 asks for the extension for CPUs, but there is no x86_64 CPU (this one is aarch64)",
        ),
        ({"TORCH_ACLNN_CPU": "yes"}, "TORCH_ACLNN_CPU must be 0, 1 or empty, but it is 'yes'"),
        ({"TORCH_ACLNN_NPU": "2"}, "TORCH_ACLNN_NPU must be 0, 1 or empty, but it is '2'"),
    ],
)
def test_a_switch_that_cannot_be_followed_is_refused(switches, said):
    result = _set_up("aarch64", **switches)
    assert result.returncode == 1
    assert f"torch_aclnn_ops: {said}" in result.stderr
