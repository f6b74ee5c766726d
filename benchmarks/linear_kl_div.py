"""linear_kl_div against torch's composition: ``python -m benchmarks.linear_kl_div``.

Time and memory of forward and backward, with a teacher twice as wide as the student.
"""

import argparse
from functools import partial

from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor
from torch.nn import functional as theirs

from benchmarks._harness import OURS, compare, forward_and_backward, parser, run
from benchmarks._results import Row
from benchmarks.linear_cross_entropy import LIMIT_OF_PRODUCTS, matrix_products

SHAPE = (1024, 256, 32000)
QUICK_SHAPE = (64, 32, 500)

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def tensors_of(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensors:
    """Return rows and head of a student, and of a teacher twice as wide; the logits have variance 1."""
    rows, features, classes = shape
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(number, width, generator=generator).div_(width**0.25).to(dtype)
        for width in (features, 2 * features)
        for number in (rows, classes)
    ]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2], made[3]


def composed(input: Tensor, head: Tensor, teacher_input: Tensor, teacher_head: Tensor) -> Tensor:
    """Compute the forward KL divergence with torch's functions, from all logits."""
    student = theirs.linear(input, head).float().log_softmax(-1)
    with torch.no_grad():
        teacher = theirs.linear(teacher_input, teacher_head).float().log_softmax(-1)
    return theirs.kl_div(student, teacher, reduction="batchmean", log_target=True)


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare in float32 and bfloat16."""
    shape, rows = QUICK_SHAPE if options.quick else SHAPE, []
    functions = {
        "kl_div of two log_softmax(linear(...))": composed,
        OURS: ours.linear_kl_div,
        f"{OURS}, reverse KL": partial(ours.linear_kl_div, divergence="reverse_kl"),
        f"{OURS}, Jensen-Shannon": partial(ours.linear_kl_div, divergence="jensen_shannon"),
    }
    for dtype in ("float32", "bfloat16"):
        tensors = tensors_of(shape, getattr(torch, dtype))
        calls = {name: forward_and_backward(function, *tensors) for name, function in functions.items()}
        calls[LIMIT_OF_PRODUCTS] = matrix_products(*tensors)
        columns = {"operator": "linear_kl_div", "configuration": " x ".join(map(str, shape)), "dtype": dtype}
        rows += compare(calls, options.rounds, least_bytes=sum(one.nbytes for one in tensors[:2]), **columns)
    return rows


if __name__ == "__main__":
    run("linear_kl_div", measure, parser(__doc__).parse_args(), rounds=5)
