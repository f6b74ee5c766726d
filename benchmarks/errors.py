"""Errors of every operator and of PyTorch's against float64: all in a CSV file, the largest in ``docs/precision.md``.

``python -m host_npu -m benchmarks.errors`` also measures on the host NPU.
"""

import csv
import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

from torch_aclnn_ops import _cpu_extension, ops

import host_npu
import torch
from torch import Tensor

from benchmarks._errors_cases import CASES, Arguments, Case, Draw, Results
from benchmarks._figures import write_between
from benchmarks._harness import report_cells
from benchmarks._results import RESULTS, ROOT, format_table

PAGE = ROOT / "docs" / "precision.md"
FILE = RESULTS / "errors.csv"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NOT_TAKEN = "not supported"
_KEY = ("operator", "arguments", "dtype", "result")


def ulps(result: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the errors in ulps of a dtype, at the true values or at their mean magnitude, whichever is larger."""
    info = torch.finfo(dtype)
    result, truth = result.double().flatten(), truth.double().flatten()
    finite = truth.abs() <= info.max
    magnitude = truth[finite].abs().mean() if finite.any() else truth.new_zeros(())
    exponent = truth.abs().clamp(info.tiny, info.max).maximum(magnitude).log2().floor()
    error = (result - truth).abs() / (info.eps * exponent.exp2())
    is_same = (result == truth) | (~finite & (result.abs() > info.max) & (result.sign() == truth.sign()))
    return error.masked_fill(is_same, 0).nan_to_num(math.inf, posinf=math.inf)


def _exact(case: Case, args: Arguments) -> Results:
    wide = (arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)
    return (case.truth or case.ours)(*wide)


def _on_npu(case: Case, args: Arguments) -> Results | None:
    """Return the results of an NPU, or ``None`` if CANN's operator does not support the arguments."""
    args = tuple(arg.to("npu") if isinstance(arg, Tensor) else arg for arg in args)
    if case.operator in ops.__all__ and getattr(ops, case.operator).why_not_cann(*args) is not None:
        return None
    return {name: result.cpu() for name, result in case.ours(*args).items()}


def rows(cases: Sequence[Case], npu: str | None = None) -> Iterator[dict[str, str]]:
    """Measure cases in every dtype; ``npu`` is the name of the device, if there is one."""
    for case in cases:
        for dtype in DTYPES:
            args = case.draw(Draw(dtype))
            measured: dict[str, Results | None] = {"CPU": case.ours(*args)}
            if npu is not None:
                measured[npu] = _on_npu(case, args)
            measured["torch"] = case.torchs(*args)
            for name, truth in _exact(case, args).items():
                key = (case.operator, case.distribution, str(dtype).removeprefix("torch."), name)
                yield dict(zip(_KEY, key, strict=True)) | {
                    by: NOT_TAKEN if results is None else _errors(results[name], truth, dtype)
                    for by, results in measured.items()
                }


def _errors(result: Tensor, truth: Tensor, dtype: torch.dtype) -> str:
    found = ulps(result, truth, dtype)
    return f"{found.max():.3g}; {found.mean():.2g}"


def machine(has_npu: bool) -> str:
    """Return a description of the machine and versions."""
    compiled = "no compiled part" if _cpu_extension.why_unavailable() else "csrc/cpu"
    versions = [f"torch {torch.__version__}"]
    if has_npu:
        versions.append(f"torch_npu {metadata.version('torch_npu')}")
    capability = torch.backends.cpu.get_cpu_capability()
    return f"Measured with {', '.join(versions)} on {platform.machine()}: {capability} in torch, {compiled}."


def largest(found: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return a row for each operator and dtype: the largest error in each column, over all arguments and results."""
    made: dict[tuple[str, str], dict[str, str]] = {}
    for row in found:
        key = {"operator": f"`{row['operator']}`", "dtype": row["dtype"]}
        errors = {by: cell.partition(";")[0] for by, cell in row.items() if by not in _KEY}
        old = made.setdefault((row["operator"], row["dtype"]), key | errors)
        for by, error in errors.items():
            old[by] = max(old[by], error, key=lambda cell: -1 if cell == NOT_TAKEN else float(cell))
    return list(made.values())


def main() -> None:
    """Measure all cases, and write the file and the page."""
    npu = None
    if hasattr(torch, "npu") and torch.npu.is_available():
        npu = "host NPU" if host_npu.is_enabled() else "NPU"
    found = []
    for row in rows(CASES, npu):
        report_cells(row)
        found.append(row)
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    write_between(PAGE, "errors", f"{format_table(largest(found))}\n\n{machine(npu is not None)}")


if __name__ == "__main__":
    main()
