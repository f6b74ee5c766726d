"""What ``python -m host_npu --list`` says; tests/npu/test_list.py has what it is made of."""

import subprocess
import sys


def test_the_list_says_of_each_name_what_runs_and_what_does_not_exist():
    names = ["npu_rms_norm", "npu_apply_adam_w", "npu_ffn", "npu_nothing"]
    command = [sys.executable, "-m", "host_npu", "--soc", "Ascend310P", "--list", *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    norm, adam, ffn, nothing = (part.splitlines() for part in result.stdout.split("\n\n"))
    assert norm[0] == "aclnnRmsNorm: computed by a formula, with CANN's documented dtypes and shapes"
    assert "On Ascend310P torch_npu calls graph operators instead, unless set_compile_mode(jit_compile=False)" in norm
    assert adam[0] == "npu_apply_adam_w: refused, a graph operator (aclop)" and ": computed by a formula" in adam[1]
    assert not any("Off" in line for line in ffn)  # "ffn" is inside of RoundOffNumber, but no word of it
    assert nothing == ["npu_nothing: torch_npu has no such function, and CANN no operator with this in its name"]
    assert result.returncode == 1  # one does not exist
