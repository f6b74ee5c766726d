"""torch's operators give the same results on the host NPU and on a CPU: forward and backward, bit for bit.

tests/op_db.py calls them, from torch's own database, in processes with a host NPU.
"""

import functools
from typing import Any

import pytest
import torch
from host_npu import testing

from tests import op_db

_DTYPES = ("float32", "bfloat16")
_PARTS = 4  # in which all operators are compared
_EVERY = 40  # one operator of this many is a representative

_IS_NARROW = "is torch.float32, not torch.float64"
_NO_FLOAT64 = "Device do not support double dtype now, dtype cast replace with float"
_NO_DOUBLE = "self not implemented for DT_DOUBLE"
_NO_GRADIENT = "CANN's gradient takes no float64, as torch's samples ask for"

# Calls that torch_npu implements or refuses itself, or through CANN's operator: a part of each message, and the reason.
# All other operators have the CPU's results and gradients in every sample.
_CHOICES = {
    "chalf": ("aclnnInplaceCopy: selfRef has dtype complex32", "no copy of CANN takes complex32"),
    "double": (_IS_NARROW, _NO_FLOAT64),
    "float_power": (_IS_NARROW, _NO_FLOAT64),
    "linalg.eig": (
        "self not implemented for DT_COMPLEX64",
        "CANN multiplies no complex matrices, as its gradient does",
    ),
    "log_softmax.with_dtype": (_NO_DOUBLE, _NO_GRADIENT),
    "nn.functional.max_pool3d": (
        "is torch.int32, not torch.int64",
        "the indices of aclnnMaxPool3dWithArgmax are int32",
    ),
    "nn.functional.max_unpool2d.grad": (
        "NPU contiguous operator only supported contiguous memory format",
        "torch_npu's contiguous() takes no channels_last",
    ),
    "nn.functional.softmin.with_dtype": (_NO_DOUBLE, _NO_GRADIENT),
    "softmax.with_dtype": (_NO_DOUBLE, _NO_GRADIENT),
    "sparse.mm.reduce": ("Could not run 'aten::_sparse_mm_reduce_impl'", "torch_npu has no kernel for 'SparseCsrnpu'"),
    "sparse.sampled_addmm": (
        "Could not run 'aten::sparse_sampled_addmm'",
        "torch_npu has no kernel for 'SparseCsrnpu'",
    ),
    "to": (_IS_NARROW, _NO_FLOAT64),
}
_LEFT_TO_PYTORCH = {"renorm": (_NO_DOUBLE, "torch_npu 2.9 leaves the gradient to PyTorch, which needs float64")}
_CHOICES_IN = {
    "float32": _CHOICES | (_LEFT_TO_PYTORCH if torch.__version__ < (2, 10) else {}),
    "bfloat16": _CHOICES
    | dict.fromkeys(
        ("bucketize", "histc", "searchsorted"), ("self not implemented for DT_BFLOAT16", "CANN has no kernel for it")
    ),
}
# Operators that do not equal the CPU's bit for bit, but are as close to float32's as the dtype allows, and why.
_ROUNDED_ONCE = "16-bit matrices are multiplied in float32 and rounded once, as on a device"
_SAMPLED_ONCE = "16-bit images are sampled in float32 and rounded once, as on a device"
_ACCUMULATED_ONCE = "16-bit numbers are accumulated in float32 and rounded once, as on a device"
_SIMULATED = "a simulated operator of CANN, whose arithmetic is float32 and rounded once"
_NOT_EXACT = {
    "float32": {
        "nn.functional.binary_cross_entropy": _SIMULATED,
        "renorm": "its gradient is torch_npu's, in float32, where the CPU's is in float64",
    },
    "bfloat16": {
        "_unsafe_masked_index": _ACCUMULATED_ONCE,
        "_unsafe_masked_index_put_accumulate": _ACCUMULATED_ONCE,
        "addbmm": _ROUNDED_ONCE,
        "addmv": _ROUNDED_ONCE,
        "grid_sampler_2d": _SAMPLED_ONCE,
        "grid_sampler_3d": _SAMPLED_ONCE,
        "masked.prod": _ACCUMULATED_ONCE,
        "nn.functional.binary_cross_entropy": _SIMULATED,
        "nn.functional.embedding": _SIMULATED,
        "nn.functional.grid_sample": _SAMPLED_ONCE,
        "nn.functional.linear_cross_entropy.chunked": _ROUNDED_ONCE,
        "nn.functional.linear_cross_entropy.chunked_none": _ROUNDED_ONCE,
        "nn.functional.mse_loss": _SIMULATED,
        "prod": _ACCUMULATED_ONCE,
    },
}

# Operators whose sums depend on the CPU and on memory alignment, although both devices call the same kernels: LAPACK,
# and 16-bit convolutions, which a CPU without bfloat16 instructions accumulates in 16 bits.
_DEPENDS_ON_THE_CPU = {"float32": ("linalg.",), "bfloat16": ("nn.functional.conv",)}

_IS_THAT_OF_THE_TABLE = torch.__version__.startswith("2.13.")

# For CUDA only.
_WITHOUT_CPU = "jiterator"


@functools.cache
def _compared_in_all(first: int, step: int) -> list[dict[str, Any]]:
    """Return the results of each operator in each dtype, always including the operators in the tables."""
    also = [[*_CHOICES_IN[dtype], *_NOT_EXACT[dtype]] if step == _EVERY else [] for dtype in _DTYPES]
    return testing.run(op_db.compare_some, 1, _DTYPES, first, step, also, device="npu", backend="", timeout=900)[0]


def _compared(dtype: str, first: int, step: int) -> dict[str, Any]:
    return _compared_in_all(first, step)[_DTYPES.index(dtype)]


_PARTS_OF_ALL = [pytest.param(first, _PARTS, marks=pytest.mark.exhaustive) for first in range(_PARTS)]
_in_parts = pytest.mark.parametrize(("first", "step"), [(0, _EVERY), *_PARTS_OF_ALL])
_in_dtypes = pytest.mark.parametrize("dtype", _DTYPES)


@_in_dtypes
@_in_parts
def test_results_and_gradients_are_the_cpus_but_for_the_choices_of_torch_npu(dtype, first, step):
    unexpected = {}
    for name, found in _compared(dtype, first, step).items():
        text, _ = _CHOICES_IN[dtype].get(name, (None, None))
        messages = found["faults"] + found["refusals"]
        # Other versions of torch_npu may differ from the table's.
        is_missing = text is not None and not messages and _IS_THAT_OF_THE_TABLE
        if is_missing or any(text is None or text not in message for message in messages):
            unexpected[name] = messages
    assert unexpected == {}


@_in_dtypes
@_in_parts
def test_only_the_operators_of_the_table_are_not_the_cpus_bit_for_bit(dtype, first, step):
    found = _compared(dtype, first, step)
    exempt = {name for name in found if name in _CHOICES_IN[dtype] or name.startswith(_DEPENDS_ON_THE_CPU[dtype])}
    rounded = {name for name, one in found.items() if not one["exact"]}
    assert rounded - exempt == (_NOT_EXACT[dtype].keys() & found.keys()) - exempt


@_in_dtypes
@_in_parts
def test_every_operator_is_compared(dtype, first, step):
    found = _compared(dtype, first, step)
    nothing = [name for name, one in found.items() if not one["compared"] + len(one["refusals"])]
    assert all(name.startswith(_WITHOUT_CPU) for name in nothing), nothing
    assert len(found) > 15
