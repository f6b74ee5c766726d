"""One measurement of benchmarks/linear_cross_entropy.py, in a separate process.

``python -m benchmarks._linear_cross_entropy_measure JSON`` prints JSON.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# torch_aclnn_ops goes before torch, see torch_aclnn_ops/_torch_npu.py.
import torch_aclnn_ops  # noqa: F401

import torch
from torch import Tensor

from benchmarks._harness import compare, peak_memory
from benchmarks._linear_cross_entropy_cases import IGNORED, LABELS, Problem, make_call
from benchmarks._results import Row

_ROWS_AT_A_TIME = 256
_CALLS = 3  # whose peak memory is compared


def memory_and_errors(problem: Problem, case: str, truths: Path) -> Row:
    """Measure the peak memory of a case that is alone in this process, and its errors.

    Args:
        problem: what is computed.
        case: a key of LABELS.
        truths: folder that keeps the float64 results for the next process.

    Returns:
        Bytes and errors by name.
    """
    tensors = problem.tensors()
    call = make_call(case, tensors)
    call()  # loads and compiles
    peak = statistics.median(peak_memory(call) for _ in range(_CALLS))  # a heap in pieces takes more in some calls
    return {"peak_bytes": peak, **_errors(call(), _truth(problem, tensors, truths))}


def times(problem: Problem, cases: Sequence[str], rounds: int) -> list[Row]:
    """Time cases in turn in one process."""
    tensors = problem.tensors()
    calls = {LABELS[case]: make_call(case, tensors) for case in cases}
    return compare(calls, rounds, operator="linear_cross_entropy")


def _errors(results: Sequence[Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    loss, *gradients = results
    errors = {"loss_error": abs(loss.double() - truth["loss"]).item()}
    for name, gradient in zip(("dx", "dw"), gradients, strict=False):
        pairs = zip(gradient.split(_ROWS_AT_A_TIME), truth[name].split(_ROWS_AT_A_TIME), strict=True)
        error = max((part.double() - true).abs().max().item() for part, true in pairs)
        errors[f"{name}_error"] = error / truth[name].abs().max().item()
    return errors


def _truth(problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], folder: Path) -> dict[str, Tensor]:
    """Compute loss and gradients in float64 by the textbook's formula, or load what another process has saved."""
    path = folder / f"{'x'.join(map(str, problem.shape))} {problem.dtype} {problem.ignored}.pt"
    if path.exists():
        return torch.load(path, mmap=True)
    input, head, target = (tensor.detach() for tensor in tensors)
    counted = target != IGNORED
    head = head.double()
    loss, dx, dw = (
        torch.zeros((), dtype=torch.float64),
        torch.zeros(input.shape, dtype=torch.float64),
        torch.zeros_like(head),
    )
    for rows in counted.nonzero().flatten().split(_ROWS_AT_A_TIME):
        chunk, classes = input[rows].double(), target[rows, None]
        logits = chunk @ head.T
        loss -= logits.log_softmax(1).gather(1, classes).sum()
        logits = logits.softmax(1)
        logits.scatter_add_(1, classes, -torch.ones(classes.shape, dtype=torch.float64))
        dx[rows] = logits @ head
        dw.addmm_(logits.T, chunk)
    truth = {"loss": loss, "dx": dx, "dw": dw}
    for tensor in truth.values():
        tensor.div_(counted.sum())
    torch.save(truth, path)
    return truth


def main(request: str) -> None:
    """Do what the request says, and print the result."""
    arguments = json.loads(request)
    torch.set_num_threads(arguments.pop("threads"))
    problem = Problem(**arguments.pop("problem"))
    if "cases" in arguments:
        result = times(problem, **arguments)
    else:
        result = memory_and_errors(problem, arguments["case"], Path(arguments["truths"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
