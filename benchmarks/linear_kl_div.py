"""linear_kl_div against torch's composition and chunks by Liger's formula: time and memory of forward and backward.

``python -m benchmarks.linear_kl_div`` compares whole calls, of a teacher twice as wide as the student. Liger's kernels
for it are torch calls, whose formula is written here once more: chunks of 1024 rows, of which ``torch.func`` makes the
loss and its gradients in the forward pass. How time and memory grow is measured against rows and classes.
"""

import argparse
from collections.abc import Callable
from functools import partial

from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor
from torch.nn import functional as theirs

from benchmarks._harness import OURS, compare, parser, run, shapes
from benchmarks._linear_cross_entropy_cases import LIMIT_OF_PRODUCTS, matrix_products
from benchmarks._results import Row

SHAPE = (1024, 256, 32000)
QUICK_SHAPE = (64, 32, 500)
_ROWS_OF_LIGER = 1024
_MOST = {"rows": 2048, "classes": 32768}
_OTHERS = {"rows": 512, "classes": 4096}
_FEATURES = 128

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def tensors_of(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensors:
    """Make rows and head of a student, and of a teacher twice as wide; the logits are of variance 1."""
    rows, features, classes = shape
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(number, width, generator=generator).div_(width**0.25).to(dtype)
        for width in (features, 2 * features)
        for number in (rows, classes)
    ]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2], made[3]


def composed(input: Tensor, head: Tensor, teacher_input: Tensor, teacher_head: Tensor) -> Tensor:
    """Compute the forward KL as torch's functions do, with all logits."""
    student = theirs.linear(input, head).float().log_softmax(-1)
    with torch.no_grad():
        teacher = theirs.linear(teacher_input, teacher_head).float().log_softmax(-1)
    return theirs.kl_div(student, teacher, reduction="batchmean", log_target=True)


class ByChunks(torch.autograd.Function):
    """Liger's formula: loss and gradients of chunks of rows in the forward pass, scaled in the backward pass."""

    @staticmethod
    def forward(ctx, input: Tensor, head: Tensor, teacher_input: Tensor, teacher_head: Tensor) -> Tensor:
        """Compute the loss and keep its gradients."""
        number, loss, head_grad, input_grads = input.shape[0], input.new_zeros((), dtype=torch.float32), None, []

        def loss_of(rows: Tensor, weight: Tensor, teacher_rows: Tensor) -> Tensor:
            student = (rows @ weight.T).float().log_softmax(-1)
            teacher = (teacher_rows @ teacher_head.T).float().log_softmax(-1)
            return theirs.kl_div(student, teacher, reduction="sum", log_target=True) / number

        chunks = zip(input.split(_ROWS_OF_LIGER), teacher_input.split(_ROWS_OF_LIGER), strict=True)
        for rows, teacher_rows in chunks:
            (of_rows, of_head), value = torch.func.grad_and_value(loss_of, (0, 1))(rows, head, teacher_rows)
            loss += value
            head_grad = of_head if head_grad is None else head_grad.add_(of_head)
            input_grads.append(of_rows)
        ctx.save_for_backward(torch.cat(input_grads), head_grad)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients."""
        input_grad, head_grad = ctx.saved_tensors
        return input_grad * grad_loss, head_grad * grad_loss, None, None


def calls_of(tensors: Tensors) -> dict[str, Callable[[], object]]:
    """Make the calls that are compared, by their names."""

    def forward_and_backward(function: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(function(*tensors), tensors[:2])

    functions = {
        "kl_div of two log_softmax(linear(...))": composed,
        "Liger's formula, chunks of 1024 rows": ByChunks.apply,
        OURS: ours.linear_kl_div,
        f"{OURS}, reverse KL": partial(ours.linear_kl_div, divergence="reverse_kl"),
        f"{OURS}, Jensen-Shannon": partial(ours.linear_kl_div, divergence="jensen_shannon"),
    }
    calls = {name: partial(forward_and_backward, function) for name, function in functions.items()}
    return {**calls, LIMIT_OF_PRODUCTS: matrix_products(*tensors)}


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare for the problem, and for more and more rows and classes."""
    shape, rows = QUICK_SHAPE if options.quick else SHAPE, []
    for dtype in ("float32", "bfloat16"):
        rows += _compared(shape, dtype, options, configuration=" x ".join(map(str, shape)))
    for shape, described in shapes(_MOST, _OTHERS, _FEATURES, options.quick):
        rows += _compared(shape, "float32", options, **described)
    return rows


def _compared(shape: tuple[int, int, int], dtype: str, options: argparse.Namespace, **columns: object) -> list[Row]:
    tensors = tensors_of(shape, getattr(torch, dtype))
    columns |= {"operator": "linear_kl_div", "dtype": dtype, "least_bytes": sum(one.nbytes for one in tensors[:2])}
    return compare(calls_of(tensors), options.rounds, **columns)


if __name__ == "__main__":
    run("linear_kl_div", measure, parser(__doc__).parse_args(), rounds=5)
