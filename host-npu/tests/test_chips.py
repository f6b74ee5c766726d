"""What PyTorch's operators do on each chip, which is the table of docs/limits.md.

Every program runs in a process of its own; this one has no NPU.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import host_npu
import pytest
from tests._output import read_json

_PROGRAM = Path(__file__).parent / "chips.py"
_PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
_HEAD = """\
| chip | `jit_compile` by default | inference | training | bfloat16 | `scaled_dot_product_attention` calls |
|---|---|---|---|---|---|
"""
_OLDER = ("Ascend910", "Ascend310P")


@functools.cache
def _found(soc: str, *arguments: str) -> Any:
    result = subprocess.run(
        [sys.executable, "-m", "host_npu", "--soc", soc, str(_PROGRAM), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_PROGRAM.parents[1]), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return read_json(result.stdout)


def _row(soc: str) -> str:
    found = _found(soc)
    runs = ["no" if found["errors"][name] else "yes" for name in ("inference", "training", "bfloat16")]
    operators = [f"`{name}`" for name in found["attention"] if "Grad" not in name]
    attention = "no" if found["errors"]["scaled_dot_product_attention"] else "".join(operators) or "PyTorch's operators"
    return f"| `{soc}` | {found['jit_compile']} | {' | '.join(runs)} | {attention} |\n"


def test_the_table_of_the_page_of_limits_is_what_each_chip_does():
    assert _HEAD + "".join(map(_row, host_npu.SOCS)) in _PAGE.read_text()


@pytest.mark.parametrize("soc", host_npu.SOCS)
def test_only_bfloat16_is_refused_and_only_where_the_chip_lacks_it(soc):
    errors = {name: error for name, error in _found(soc)["errors"].items() if error}
    assert list(errors) == (["bfloat16"] if soc in _OLDER else [])
    assert all("bfloat16, which this chip does not have" in error for error in errors.values())
    assert _found(soc)["goes on"] == [2.0, 2.0]


@pytest.mark.parametrize("soc", host_npu.SOCS)
def test_copies_of_bfloat16_are_computed_with_only_where_the_chip_has_it(soc):
    error = _found(soc, "bfloat16")["error"]
    assert ("a tensor has dtype bfloat16, which this chip does not have" in error) == (soc in _OLDER)
    assert soc in _OLDER or error == ""


@pytest.mark.parametrize("soc", host_npu.SOCS)
def test_older_chips_compile_graph_operators_at_the_call(soc):
    # As torch_npu documents it of set_compile_mode.
    assert _found(soc)["jit_compile"] == (soc in _OLDER)


@pytest.mark.parametrize("soc", [soc for soc in host_npu.SOCS if soc not in _OLDER])
def test_attention_drops_the_same_in_both_directions(soc):
    found = _found(soc)["dropout"]
    assert found["gradient"] and abs(found["kept"] - 0.75) < 0.02 and abs(found["scaled"] - 1 / 0.75) < 1e-2


@pytest.mark.parametrize("soc", host_npu.SOCS)
def test_the_gradient_of_an_embedding_is_refused_where_cann_has_no_kernel(soc):
    error = _found(soc, "embedding")["error"]
    assert ("aclnnEmbeddingDenseBackward: no kernel of this chip" in error) == (soc == "Ascend310P")
    assert soc == "Ascend310P" or error == ""
