"""One measurement of benchmarks/linear_cross_entropy.py, in a process of its own.

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

from benchmarks._harness import interleaved, peak_memory
from benchmarks._linear_cross_entropy_cases import IGNORED, LIMIT, Problem, is_installed, make_call

THREADS = 2
_ROWS_AT_A_TIME = 256


def measure(problem: Problem, case: str, backward: bool, rounds: int, truths: Path) -> dict[str, float]:
    """Measure a case by itself.

    Args:
        problem: what is computed.
        case: a key of LABELS.
        backward: whether gradients are computed too.
        rounds: timed calls.
        truths: folder that keeps the float64 results for the next process.

    Returns:
        Seconds, bytes and errors by name.
    """
    tensors = problem.tensors()
    call = make_call(case, tensors, backward)
    first, *later = [peak_memory(call) for _ in range(4)]  # the first also loads and compiles
    peak = statistics.median(later)  # a heap in pieces takes more in one call than in another
    timing = interleaved({case: call}, rounds)[case]
    found = {
        "peak_bytes": peak,
        "most_peak_bytes": max(later),
        "first_peak_bytes": first,
        "median_s": timing.median,
        "minimum_s": timing.minimum,
    }
    if case == LIMIT:
        # The buffers were there before. What a caller gets is the least that a loss has to allocate.
        gradients = sum(tensor.numel() * tensor.element_size() for tensor in tensors[:2])
        return {**found, **dict.fromkeys(("peak_bytes", "most_peak_bytes"), gradients if backward else 0)}
    return {**found, **_errors(call(), _truth(problem, tensors, truths))}


def measure_interleaved(problem: Problem, cases: Sequence[str], backward: bool, rounds: int) -> dict[str, object]:
    """Time cases in turn in one process; return median and minimum seconds by case."""
    tensors = problem.tensors()
    calls = {case: make_call(case, tensors, backward) for case in cases if is_installed(case)}
    return {case: (timing.median, timing.minimum) for case, timing in interleaved(calls, rounds).items()}


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
    arguments["problem"] = Problem(**arguments["problem"])
    torch.set_num_threads(THREADS)
    if "cases" in arguments:
        result = measure_interleaved(**arguments)
    else:
        result = measure(**{**arguments, "truths": Path(arguments["truths"])})
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
