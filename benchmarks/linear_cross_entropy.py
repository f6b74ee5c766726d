"""linear_cross_entropy against its peers and against the matrix products alone: time, memory and errors.

``python -m benchmarks.linear_cross_entropy`` compares whole calls, forward and backward, with the loss of the logits:
as it is, compiled and chunked; with torch's own function in its ways to split the rows; with Liger's formula in calls
of torch, because its kernels are triton's, for GPUs and NPUs; with Apple's cut-cross-entropy where it is installed
(``pip install ".[benchmark]"``); and with this package as it is where csrc/cpu was not built. For one problem,
``--shape``, the times of all cases are taken in turn in one process, and memory and errors of each in a process of its
own. How time and memory grow with rows and with classes is measured in this process.

On two cores that takes a quarter of an hour; ``--table``, for the rows of the README's table only, takes three minutes.
On CPUs without bfloat16 instructions, torch needs a minute for one bfloat16 call, so that bfloat16 is only measured if
``--dtypes`` names it.

``--npu`` counts the launches of a small bfloat16 call on an NPU, or on the host NPU, and compares its time with that of
CANN's three operators alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile

from torch_aclnn_ops import _extension
from torch_aclnn_ops.functional import linear_cross_entropy

import host_npu
import torch

from benchmarks._harness import OURS, Call, absent, compare, doublings, forward_and_backward, parser, report, run
from benchmarks._launches import count_launches
from benchmarks._linear_cross_entropy_cases import LABELS, Problem, make_call, why_absent
from benchmarks._results import ROOT, Row, has_bfloat16_instructions

SHAPE = (2048, 512, 32000)
QUICK_SHAPE = (64, 32, 500)
_ON_NPU = (64, 32, 256)
_SWEPT = ("naive", "compiled", "chunked", "torch-512", "liger", OURS, "limit")
_FEATURES, _FEW_FEATURES = 256, 32
_FEW_ROWS, _FEW_CLASSES = 1024, 8192
_MOST = {"rows": 2048, "classes": 131072}
_LONGEST_PROCESS = 240  # seconds
_IN_TABLE = ("naive", "torch-auto", "liger", OURS)
_COLUMNS = {"operator": "linear_cross_entropy", "device": "cpu"}


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare for the problem, and for more and more rows and classes."""
    rows = []
    wanted = [case for case in options.cases if not (options.quick and case == "compiled")]
    if options.table:
        wanted = [case for case in wanted if case in _IN_TABLE]
    cases = [case for case in wanted if why_absent(case) is None]
    for dtype in options.dtypes:
        rows += _one_problem(Problem(options.shape, dtype, options.ignored), cases, options)
    if "bfloat16" not in options.dtypes and not has_bfloat16_instructions():
        rows.append(absent("bfloat16", "this CPU has no instructions for it; see --dtypes", **_COLUMNS))
    if options.table:
        return rows
    for variable, most in _MOST.items():
        for size in doublings(most, options.quick):
            rows += _one_size(variable, size, [case for case in _SWEPT if case in cases], options)
    rows += [absent(LABELS[case], reason, **_COLUMNS) for case in wanted if (reason := why_absent(case)) is not None]
    return rows


def _one_problem(problem: Problem, cases: list[str], options: argparse.Namespace) -> list[Row]:
    ignored = f", {problem.ignored:.0%} of the rows ignored" if problem.ignored else ""
    shape = " x ".join(map(str, problem.shape))
    columns = {**_COLUMNS, "configuration": f"{shape}{ignored}", "dtype": problem.dtype}
    found = _times(problem, cases, options)
    rows = []
    with tempfile.TemporaryDirectory() as truths:
        for case in cases:
            row = {**columns, "by": LABELS[case], "status": "measured", **found.get(LABELS[case], {})}
            if case == "limit":
                row["peak_bytes"] = problem.gradient_bytes
            else:
                row = _in_new_process(problem, options.threads, case=case, truths=truths) | row
            report(row)
            rows.append(row)
    return rows


def _times(problem: Problem, cases: list[str], options: argparse.Namespace) -> dict[str, Row]:
    print(f"timing {len(cases)} cases in turn, {problem.dtype}, in about a minute", file=sys.stderr, flush=True)
    timed = _in_new_process(problem, options.threads, cases=cases, rounds=options.rounds)
    if isinstance(timed, list):
        return {row["by"]: row for row in timed}
    return {LABELS[case]: timed for case in cases}


def _one_size(variable: str, size: int, cases: list[str], options: argparse.Namespace) -> list[Row]:
    number, classes = (size, _FEW_CLASSES) if variable == "rows" else (_FEW_ROWS, size)
    features = _FEW_FEATURES if options.quick else _FEATURES
    problem = Problem((number, features, classes), "float32", 0.0)
    tensors = problem.tensors()
    others = f"{classes} classes" if variable == "rows" else f"{number} rows"
    columns = {**_COLUMNS, "configuration": f"{others}, {features} features", "dtype": "float32"}
    calls = {LABELS[case]: make_call(case, tensors) for case in cases}
    return compare(calls, options.rounds, least_bytes=problem.gradient_bytes, **columns, variable=variable, size=size)


def _in_new_process(problem: Problem, threads: int, **arguments: object) -> object:
    described = {"shape": problem.shape, "dtype": problem.dtype, "ignored": problem.ignored}
    request = json.dumps({"problem": described, "threads": threads, **arguments})
    command = [sys.executable, "-m", "benchmarks._linear_cross_entropy_measure", request]
    try:
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=_LONGEST_PROCESS)
    except subprocess.TimeoutExpired:
        return {"status": f"failed: not done after {_LONGEST_PROCESS} seconds"}
    if process.returncode:
        reason = process.stderr.strip().splitlines()
        return {"status": f"failed ({process.returncode}): {reason[-1] if reason else ''}"}
    return json.loads(process.stdout.splitlines()[-1])


def _measure_on_npu(options: argparse.Namespace) -> list[Row]:
    """Compare with the operators' entries; the host NPU computes torch's operators on the host, so all wait for it."""
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

    def naive(input: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, head), target)

    cases: dict[str, Call] = {
        "CANN's three operators": operators,
        "cross_entropy(linear(...))": forward_and_backward(naive, input, head, target),
        OURS: forward_and_backward(linear_cross_entropy, input, head, target),
        f'{OURS}, reduction="none"': forward_and_backward(linear_cross_entropy, input, head, target, reduction="none"),
    }
    launches = {by: count_launches(case).total() for by, case in cases.items()}
    columns = {"operator": "linear_cross_entropy", "device": "npu", "dtype": "bfloat16"}
    made = compare(
        cases,
        options.rounds,
        torch.npu.synchronize,
        calls=1,
        before=torch.npu.synchronize,
        configuration="x".join(map(str, _ON_NPU)),
        **columns,
    )
    return [{**row, "launches": launches[str(row["by"])]} for row in made]


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(map(int, text.split("x")))
    if len(shape) != 3 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"must be ROWSxFEATURESxCLASSES, got {text!r}")
    return shape


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--shape", type=_shape, help=f"rows x features x classes (default: {SHAPE})")
    dtypes = ["float32", "bfloat16"]
    default = dtypes if has_bfloat16_instructions() else dtypes[:1]
    arguments.add_argument("--dtypes", nargs="+", default=default, choices=dtypes, help=f"default: {' '.join(default)}")
    arguments.add_argument("--cases", nargs="+", default=list(LABELS), choices=list(LABELS), help="by default all")
    arguments.add_argument("--ignored", type=float, default=0.0, help="share of the rows that are ignored")
    arguments.add_argument("--table", action="store_true", help="only the rows of the README's table, in three minutes")
    arguments.add_argument("--npu", action="store_true", help="a small call on an NPU, or on the host NPU")
    options = arguments.parse_args()
    if options.npu:
        if not hasattr(torch, "npu"):
            host_npu.enable()
        run("linear_cross_entropy_npu", _measure_on_npu, options, rounds=200)
        sys.exit()
    if not (options.quick or options.table):
        print("a quarter of an hour on two cores; --table takes three minutes", file=sys.stderr, flush=True)
    options.shape = options.shape or (QUICK_SHAPE if options.quick else SHAPE)
    run("linear_cross_entropy", measure, options, rounds=5)
