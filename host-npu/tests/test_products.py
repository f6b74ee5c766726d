"""On the host NPU products of 16-bit matrices are computed in float32 and rounded once, as on a device."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import products
import pytest
from tests._output import read_json

_TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a program with a host NPU found."""
    result = subprocess.run(
        [sys.executable, "-m", "host_npu", _TESTS / "products.py"],
        # Products of other dtypes are PyTorch's, where a device refuses them.
        env={
            **os.environ,
            "HOST_NPU_DTYPES": "torch",
            "PYTHONPATH": os.pathsep.join([str(_TESTS.parent), *sys.path[1:]]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return read_json(result.stdout)


@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize("name", products.PRODUCTS)
def test_the_result_is_float32s_rounded_once(found, name, dtype):
    assert found["rounded once"][f"{name} {dtype}"]


def test_a_product_is_not_rounded_before_something_is_added(found):
    assert found["sum of product"] == [2.0, 2.0]


def test_attention_drops_the_same_as_in_float32(found):
    assert found["attention with dropout"] == [True, True]


def test_dtypes_that_differ_are_refused_as_on_a_cpu(found):
    assert "expected m1 and m2 to have the same dtype" in found["mixed dtypes"]


def test_other_dtypes_are_computed_as_on_a_cpu(found):
    assert found["other dtypes"] == [True, True, True]
