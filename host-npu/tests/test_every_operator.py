"""Every operator of torch_npu runs or is refused by its name, and the program goes on.

The calls are made in processes of their own, so that a crash is seen.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from host_npu import _operators
from tests._output import read_json

_PROGRAM = Path(__file__).parent / "every_operator.py"
_PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
_PARTS = 4
# What the messages of torch_npu and its loader say when something is missing rather than refused.
_MISLEADING = re.compile("not in libopapi|upgrade CANN|Errno|Inner error|queue has ended|undefined symbol")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(_PROGRAM.parents[1]), *sys.path[1:]])
    # Some operators write files.
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-m", "host_npu", *arguments],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
        )


@functools.cache
def _found(part: int) -> dict[str, list[str]]:
    result = _run(str(_PROGRAM), str(part), str(_PARTS))
    assert result.returncode == 0, result.stderr[-2000:]
    return read_json(result.stdout)


@pytest.mark.parametrize("part", range(_PARTS))
def test_every_operator_runs_or_raises_a_clear_error(part):
    misleading = {call: error for call, (error, _) in _found(part).items() if _MISLEADING.search(error)}
    assert misleading == {}


@pytest.mark.parametrize("part", range(_PARTS))
def test_after_every_operator_others_compute_the_right_thing(part):
    wrong = {call: (error, after) for call, (error, after) in _found(part).items() if after}
    assert wrong == {}


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("npu::npu_lightning_indexer_grad", "aclnnLightningIndexerGrad"),
        ("npu::npu_grouped_matmul", "aclnnGroupedMatmul"),
        ("atb::_npu_quant_rms_norm", "ATB's RmsNorm"),
    ],
)
def test_a_refusal_says_the_name(operator, name):
    errors = [error for part in range(_PARTS) for call, (error, _) in _found(part).items() if call.startswith(operator)]
    assert any(f"the host NPU does not simulate {name}" in error for error in errors)


def _is_for_programs(function: str) -> bool:
    return function.startswith("npu_") and not function.endswith(("_backward", "_fwd", "_grad"))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is torch_npu 2.13's")
def test_the_functions_that_are_listed_as_graph_operators_are_those_that_are_refused_as_such():
    refused, running = set(), set()
    for part in range(_PARTS):
        for call, (error, _) in _found(part).items():
            # The shapes are made up, so torch_npu itself may refuse the other calls.
            function = call.partition("::")[2].partition(".")[0]
            if "the graph operator (aclop) of" in error:
                refused.add(function)
            elif not error:
                running.add(function)
    listed = set(_operators._GRAPH_FUNCTIONS)
    assert listed - refused == set()
    assert set(filter(_is_for_programs, refused - running)) - listed == set()


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is torch_npu 2.13's")
def test_the_page_of_operators_is_what_the_list_prints():
    assert _run("--list").stdout == _PAGE.read_text(), "python -m host_npu --list > docs/operators.md"


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
    lines = _run("--soc", soc, "--list", function).stdout.splitlines()
    assert lines[0] == f"torch_npu.{function.rpartition('.')[2]} {does.format(soc)}:"
    assert lines[1].startswith(operator) and lines[2] == "Others with this name:"
    assert not [line for line in lines[3:] if line.startswith(operator)]


def test_the_list_says_what_runs_and_what_does_not_exist():
    functions = ["npu_dtype_cast", "npu_format_cast", "npu_conv2d", "npu_ffn", "npu_nothing"]
    result = _run("--soc", "Ascend910B", "--list", *functions)
    firsts = [lines.splitlines()[:2] for lines in result.stdout.split("\n\n")]
    assert "Off" not in result.stdout  # "ffn" is inside of RoundOffNumber, but not one of its words
    assert result.returncode == 1 and firsts == [
        [
            "torch_npu.npu_dtype_cast calls on Ascend910B, with its required arguments:",
            "aclnnCast: simulated with CANN's checks",
        ],
        [
            "torch_npu.npu_format_cast runs on Ascend910B, and calls no operator of CANN with its required arguments",
            "Others with this name:",
        ],
        ["npu_conv2d: refused, a graph operator (aclop)", "aclnnDeformableConv2d: refused"],
        [
            "Which of these torch_npu.npu_ffn calls on Ascend910B is not known here:",
            "aclnnFFNV2: computed by a formula, with PyTorch's dtypes and shapes",
        ],
        ["npu_nothing: torch_npu has no such function, and CANN no operator with this in its name"],
    ]


@pytest.mark.parametrize("function", ["npu_apply_adam_w", "npu_silu_backward"])
def test_a_refused_graph_operator_comes_before_an_operator_of_its_name(function):
    lines = _run("--soc", "Ascend910B", "--list", function).stdout.splitlines()
    assert lines[0] == f"{function}: refused, a graph operator (aclop)" and ": computed by a formula" in lines[1]


def test_the_list_ends_quietly_where_nobody_reads_on():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "host_npu", "--list"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert result.returncode == -signal.SIGPIPE and "Traceback" not in result.stderr
