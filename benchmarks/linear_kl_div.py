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

from benchmarks._harness import LIMIT, OURS, compare, doublings, parser, run
from benchmarks._results import Row

SHAPE = (1024, 256, 32000)
QUICK_SHAPE = (64, 32, 500)
_ROWS_OF_LIGER = 1024
_MOST = {"rows": 2048, "classes": 32768}
_FEATURES, _FEW_ROWS, _FEW_CLASSES = 128, 512, 4096

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


def matrix_products(tensors: Tensors) -> Callable[[], None]:
    """Make the four products that no loss can do without, into memory that is there."""
    input, head, teacher_input, teacher_head = (tensor.detach() for tensor in tensors)
    logits = input.new_empty(len(input), len(head))
    input_grad, head_grad = torch.empty_like(input), torch.empty_like(head)

    def products() -> None:
        torch.mm(teacher_input, teacher_head.T, out=logits)
        torch.mm(input, head.T, out=logits)
        torch.mm(logits, head, out=input_grad)
        torch.mm(logits.T, input, out=head_grad)

    return products


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
    return {**calls, f"{LIMIT}the matrix products alone": matrix_products(tensors)}


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare for the problem, and for more and more rows and classes."""
    rows = []
    columns = {"operator": "linear_kl_div", "device": "cpu"}
    for dtype in ("float32", "bfloat16"):
        shape = QUICK_SHAPE if options.quick else SHAPE
        described = {"configuration": " x ".join(map(str, shape)), "dtype": dtype}
        rows += _compared(shape, options, **columns, **described)
    for variable, most in _MOST.items():
        for size in doublings(most, options.quick):
            number, classes = (size, _FEW_CLASSES) if variable == "rows" else (_FEW_ROWS, size)
            others = f"{classes} classes" if variable == "rows" else f"{number} rows"
            described = {"configuration": f"{others}, {_FEATURES} features", "dtype": "float32"}
            shape = (number, _FEATURES, classes)
            rows += _compared(shape, options, **columns, **described, variable=variable, size=size)
    return rows


def _compared(shape: tuple[int, int, int], options: argparse.Namespace, **columns: str | int) -> list[Row]:
    tensors = tensors_of(shape, getattr(torch, str(columns["dtype"])))
    least_bytes = sum(tensor.nbytes for tensor in tensors[:2])
    return compare(calls_of(tensors), options.rounds, least_bytes=least_bytes, **columns)


if __name__ == "__main__":
    run("linear_kl_div", measure, parser(__doc__).parse_args(), rounds=5)
