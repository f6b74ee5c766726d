"""linear_cross_entropy against its peers and against the matrix products alone: time, memory and errors.

``python -m benchmarks.linear_cross_entropy`` compares whole calls, forward and backward, with the loss of the logits:
as it is, compiled and chunked; with torch's own function in its ways to split the rows; with Liger's formula in calls
of torch, because its kernels are triton's, for GPUs and NPUs; with Apple's cut-cross-entropy where it is installed
(``pip install ".[benchmark]"``); and with this package as it is where csrc/cpu was not built. Memory and time are
measured as rows and classes grow, too.

On two cores that takes some six minutes; ``--table``, for the rows of the README's table only, takes three minutes.
On CPUs without bfloat16 instructions, torch needs a minute for one bfloat16 call, which is not measured there.

``--npu`` counts the launches of a small bfloat16 call on an NPU, or on the host NPU, and compares its time with that of
CANN's three operators alone.
"""

import argparse
import sys
from collections.abc import Mapping

from torch_aclnn_ops import _extension
from torch_aclnn_ops.functional import linear_cross_entropy

import torch

from benchmarks._harness import OURS, Call, absent, compare, forward_and_backward, parser, run, shapes, use_npu
from benchmarks._launches import compare_on_npu
from benchmarks._linear_cross_entropy_cases import (
    LIGER,
    NAIVE,
    NOT_SWEPT,
    TORCHS,
    Tensors,
    absences,
    calls_of,
    errors,
    naive,
    tensors_of,
    truth_of,
)
from benchmarks._results import Row, has_bfloat16_instructions

SHAPE, QUICK_SHAPE, _ON_NPU = (2048, 512, 32000), (64, 32, 500), (64, 32, 256)
_FEATURES, _FEW_FEATURES = 256, 32
_MOST = {"rows": 2048, "classes": 131072}
_OTHERS = {"rows": 1024, "classes": 8192}
_IN_TABLE = (NAIVE, TORCHS, LIGER, OURS)
_COLUMNS = {"operator": "linear_cross_entropy", "device": "cpu"}


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare for the problem, and for more and more rows and classes."""
    shape = QUICK_SHAPE if options.quick else SHAPE
    rows = _one_problem(shape, "float32", options)
    if has_bfloat16_instructions():
        rows += _one_problem(shape, "bfloat16", options)
    else:
        rows.append(absent("bfloat16", "this CPU has no instructions for it", **_COLUMNS))
    if options.table:
        return rows
    features = _FEW_FEATURES if options.quick else _FEATURES
    for shape, described in shapes(_MOST, _OTHERS, features, options.quick):
        tensors = tensors_of(shape, torch.float32)
        calls = {by: call for by, call in calls_of(tensors, options.quick).items() if by not in NOT_SWEPT}
        rows += _compared(tensors, calls, options, **described)
    return rows + absences(**_COLUMNS)


def _one_problem(shape: tuple[int, int, int], dtype: str, options: argparse.Namespace) -> list[Row]:
    tensors = tensors_of(shape, getattr(torch, dtype))
    calls = calls_of(tensors, options.quick)
    if options.table:
        calls = {by: calls[by] for by in _IN_TABLE if by in calls}
    rows = _compared(tensors, calls, options, configuration=" x ".join(map(str, shape)), dtype=dtype)
    truth = truth_of(tensors)
    return [{**row, **errors(call(), truth)} for row, call in zip(rows, calls.values(), strict=True)]


def _compared(tensors: Tensors, calls: Mapping[str, Call], options: argparse.Namespace, **columns: object) -> list[Row]:
    least_bytes = sum(tensor.nbytes for tensor in tensors[:2])
    return compare(calls, options.rounds, least_bytes=least_bytes, **_COLUMNS, **columns)


def _measure_on_npu(options: argparse.Namespace) -> list[Row]:
    """Compare with the operators' entries; the host NPU computes torch's operators on the host, so all wait for it."""
    use_npu()
    rows, features, classes = _ON_NPU
    input, head = (torch.randn(size, features).bfloat16().npu().requires_grad_() for size in (rows, classes))
    target, grad = torch.randint(classes, (rows,)).npu(), torch.ones(rows).npu()
    max_sum, loss, gradients = (
        _extension.entries[f"fused_{name}"]
        for name in ("linear_online_max_sum", "cross_entropy_loss_with_max_sum", "linear_cross_entropy_loss_grad")
    )

    tensors = input.detach(), head.detach()

    def operators() -> None:
        largest, total, predicted, mask, masked, _ = max_sum(*tensors, target, 0, classes, False)
        loss(largest, total, predicted, None)
        gradients(grad, *tensors, mask, masked, largest, total, None)

    cases: dict[str, Call] = {
        "CANN's three operators": operators,
        "cross_entropy(linear(...))": forward_and_backward(naive, input, head, target),
        OURS: forward_and_backward(linear_cross_entropy, input, head, target),
        f'{OURS}, reduction="none"': forward_and_backward(linear_cross_entropy, input, head, target, reduction="none"),
    }
    columns = {"operator": "linear_cross_entropy", "dtype": "bfloat16", "configuration": "x".join(map(str, _ON_NPU))}
    return compare_on_npu(cases, options.rounds, torch.npu.synchronize, **columns)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--table", action="store_true", help="only the rows of the README's table, in three minutes")
    arguments.add_argument("--npu", action="store_true", help="a small call on an NPU, or on the host NPU")
    options = arguments.parse_args()
    if options.npu:
        run("linear_cross_entropy_npu", _measure_on_npu, options, rounds=200)
    else:
        if not (options.quick or options.table):
            print("some six minutes on two cores; --table takes three minutes", file=sys.stderr, flush=True)
        run("linear_cross_entropy", measure, options, rounds=5)
