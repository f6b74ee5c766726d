"""What ``python -m host_npu --list`` says; tests/npu/test_list.py has what it is made of."""

import functools
import os
import signal
import subprocess
import sys

import pytest

_COMMAND = [sys.executable, "-m", "host_npu"]
# The names that are asked for, by chip: a command takes as long for one as for all of them.
_NAMES = {
    "Ascend910B": [
        *("npu_rms_norm", "npu_dtype_cast", "npu_format_cast", "npu_conv2d", "npu_ffn", "npu_nothing"),
        *("npu_apply_adam_w", "npu_silu_backward"),
    ],
    "Ascend310P": ["npu_rms_norm"],
    "Ascend950": ["torch_npu.npu_fusion_attention"],
}


@functools.cache
def _listed(soc: str) -> tuple[int, dict[str, list[str]]]:
    """Return the exit status, and the lines of each name."""
    command = [*_COMMAND, "--soc", soc, "--list", *_NAMES[soc]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [part.splitlines() for part in result.stdout.split("\n\n")]
    return result.returncode, dict(zip(_NAMES[soc], lines, strict=True))


@pytest.mark.parametrize(
    ("soc", "function", "does", "operator"),
    [
        (
            "Ascend910B",
            "npu_rms_norm",
            "calls on {}, with its required arguments",
            "aclnnRmsNorm: computed by a formula",
        ),
        (
            "Ascend310P",
            "npu_rms_norm",
            "asks for these on {}, and its call with made-up arguments is refused",
            "RmsNorm: refused, a graph operator (aclop)",
        ),
        (
            "Ascend950",
            "torch_npu.npu_fusion_attention",
            "calls on {}, with its required arguments",
            "aclnnFlashAttentionScoreV4: computed by a formula",
        ),
    ],
)
def test_the_list_begins_with_what_the_function_calls_on_the_chip(soc, function, does, operator):
    _, listed = _listed(soc)
    first, second, third, *others = listed[function]
    assert first == f"torch_npu.{function.rpartition('.')[2]} {does.format(soc)}:"
    assert second.startswith(operator) and third == "Others with this name:"
    assert not [line for line in others if line.startswith(operator)]


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (
            "npu_dtype_cast",
            [
                "torch_npu.npu_dtype_cast calls on Ascend910B, with its required arguments:",
                "aclnnCast: simulated with CANN's checks",
            ],
        ),
        (
            "npu_format_cast",
            [
                "torch_npu.npu_format_cast runs on Ascend910B,"
                " and calls no operator of CANN with its required arguments",
                "Others with this name:",
            ],
        ),
        ("npu_conv2d", ["npu_conv2d: refused, a graph operator (aclop)", "aclnnDeformableConv2d: refused"]),
        (
            "npu_ffn",
            [
                "Which of these torch_npu.npu_ffn calls on Ascend910B is not known here:",
                "aclnnFFNV2: computed by a formula, with PyTorch's dtypes and shapes",
            ],
        ),
        ("npu_nothing", ["npu_nothing: torch_npu has no such function, and CANN no operator with this in its name"]),
    ],
)
def test_the_list_says_what_runs_and_what_does_not_exist(function, lines):
    status, listed = _listed("Ascend910B")
    assert listed[function][:2] == lines
    assert not any("Off" in line for line in listed["npu_ffn"])  # "ffn" is inside of RoundOffNumber, but no word of it
    assert status == 1  # one does not exist


@pytest.mark.parametrize("function", ["npu_apply_adam_w", "npu_silu_backward"])
def test_a_refused_graph_operator_comes_before_an_operator_of_its_name(function):
    _, listed = _listed("Ascend910B")
    first, second, *_ = listed[function]
    assert first == f"{function}: refused, a graph operator (aclop)" and ": computed by a formula" in second


def test_the_list_ends_quietly_where_nobody_reads_on():
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([*_COMMAND, "--list"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert result.returncode == -signal.SIGPIPE and "Traceback" not in result.stderr
