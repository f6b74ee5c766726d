"""linear_cross_entropy against its peers and against the matrix products alone: time, memory and errors.

``python -m benchmarks.linear_cross_entropy`` compares whole calls, forward and backward, with the loss of all logits:
eager, compiled and chunked; with torch's own function and its ways to split the rows; and with Liger's formula in torch
calls, because its triton kernels need a GPU or an NPU. Memory and time are also measured for increasing numbers of
classes. On CPUs without bfloat16 instructions, torch needs a minute for one bfloat16 call, which is not measured there.

``--npu`` counts the launches of a small bfloat16 call on an NPU, or on the host NPU, and compares its time with that of
CANN's three operators alone.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial

from torch_aclnn_ops import _extension
from torch_aclnn_ops.functional import linear_cross_entropy

import torch
from torch import Tensor
from torch.nn import functional as theirs
from torch.utils.checkpoint import checkpoint

from benchmarks._harness import LIMIT, OURS, Call, compare, doublings, forward_and_backward, parser, run, use_npu
from benchmarks._launches import compare_on_npu
from benchmarks._results import Row, has_bfloat16_instructions

NAIVE, TORCHS, LIGER = "cross_entropy(linear(...))", "torch, LinearCrossEntropyOptions()", "Liger's formula"
LIMIT_OF_PRODUCTS = f"{LIMIT}the matrix products alone"
SHAPE, QUICK_SHAPE, _ON_NPU = (2048, 512, 32000), (64, 32, 500), (64, 32, 256)
# Rows, features and most classes of the sweep, which omits peers that take too long.
_SWEEP, _QUICK_SWEEP, _NOT_SWEPT = (1024, 256, 2**17), (1024, 32, 2**17), (TORCHS, LIGER)
_ROWS_OF_A_CHUNK = 256

Tensors = tuple[Tensor, Tensor, Tensor]


def tensors_of(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensors:
    """Return rows, head and targets; the logits have variance 1."""
    rows, features, classes = shape
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(rows, features, generator=generator).to(dtype)
    head = torch.randn(classes, features, generator=generator).div_(features**0.5).to(dtype)
    return input.requires_grad_(), head.requires_grad_(), torch.randint(classes, (rows,), generator=generator)


def naive(input: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Compute the loss from all logits."""
    return theirs.cross_entropy(theirs.linear(input, head), target)


def _chunked(input: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Compute what users without a fused loss write: logits of some rows at a time, recomputed in the backward pass."""

    def sum_of(rows: Tensor, targets: Tensor) -> Tensor:
        return theirs.cross_entropy(theirs.linear(rows, head).float(), targets, reduction="sum")

    pairs = zip(input.split(_ROWS_OF_A_CHUNK), target.split(_ROWS_OF_A_CHUNK), strict=True)
    sums = [checkpoint(sum_of, rows, targets, use_reentrant=False) for rows, targets in pairs]
    return torch.stack(sums).sum() / len(target)


class _LigersFormula(torch.autograd.Function):
    """Liger's formula in torch calls, because its kernels need a GPU or an NPU.

    Loss and gradients of chunks of rows are computed in the forward pass. A chunk has about as many logits as the input
    has elements. As in Liger's default, logits, their gradient and the accumulated gradient of the head have the
    input's dtype; the loss and intermediate values of its kernel are float32.
    """

    @staticmethod
    def forward(ctx, input: Tensor, head: Tensor, target: Tensor) -> Tensor:
        """Compute the loss and keep its gradients."""
        (rows, features), classes = input.shape, len(head)
        size = min(rows, 1 << (-(-rows // -(-classes // features)) - 1).bit_length())
        loss = input.new_zeros((), dtype=torch.float32)
        input_grad, head_grad = torch.empty_like(input), torch.zeros_like(head)
        for begin in range(0, rows, size):
            part = input[begin : begin + size]
            of_part, logits_grad = _with_gradient((part @ head.T).float(), target[begin : begin + size], rows)
            loss += of_part
            logits_grad = logits_grad.to(input.dtype)
            torch.mm(logits_grad, head, out=input_grad[begin : begin + size])
            head_grad += logits_grad.T @ part
        ctx.save_for_backward(input_grad, head_grad)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients."""
        input_grad, head_grad = ctx.saved_tensors
        return input_grad.mul_(grad_loss), head_grad.mul_(grad_loss), None


def _with_gradient(logits: Tensor, target: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the loss of some of ``number`` rows, and its gradient with respect to the logits, which replaces them."""
    classes = target[:, None]
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, classes)).sum() / number
    gradient = logits.sub_(total).exp_()
    gradient.scatter_add_(1, classes, gradient.new_full(classes.shape, -1))
    return loss, gradient.div_(number)


def calls_of(tensors: Tensors, quick: bool) -> dict[str, Call]:
    """Return the compared calls, by name."""
    functions: dict[str, Callable[..., Tensor]] = {NAIVE: naive}
    if not quick:
        functions["torch.compile of cross_entropy(linear(...))"] = torch.compile(naive, dynamic=True)
    functions["cross_entropy(linear(...)) of 256 rows, checkpointed"] = _chunked
    if hasattr(theirs, "linear_cross_entropy"):  # from torch 2.13
        options = torch.nn.LinearCrossEntropyOptions
        of_512 = options(batch_chunk_size=512, chunking_method=None)
        functions[TORCHS] = partial(theirs.linear_cross_entropy, options=options())
        functions["torch, batch_chunk_size=512"] = partial(theirs.linear_cross_entropy, options=of_512)
    functions |= {LIGER: _LigersFormula.apply, OURS: linear_cross_entropy}
    calls = {name: forward_and_backward(function, *tensors) for name, function in functions.items()}
    return {**calls, LIMIT_OF_PRODUCTS: matrix_products(*tensors[:2])}


def matrix_products(input: Tensor, head: Tensor, *teacher: Tensor) -> Call:
    """Return a call of the products that every loss needs, into allocated memory."""
    input, head, *teacher = (tensor.detach() for tensor in (input, head, *teacher))
    logits = input.new_empty(len(input), len(head))
    input_grad, head_grad = torch.empty_like(input), torch.empty_like(head)

    def products() -> None:
        if teacher:
            torch.mm(teacher[0], teacher[1].T, out=logits)
        torch.mm(input, head.T, out=logits)
        torch.mm(logits, head, out=input_grad)
        torch.mm(logits.T, input, out=head_grad)

    return products


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare for the problem, and for increasing numbers of classes."""
    shape = QUICK_SHAPE if options.quick else SHAPE
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16") if has_bfloat16_instructions() else ("float32",):
        tensors = tensors_of(shape, getattr(torch, dtype))
        calls = calls_of(tensors, options.quick)
        compared = _compared(tensors, calls, options, configuration=" x ".join(map(str, shape)), dtype=dtype)
        truth = _truth_of(tensors)
        for row, call in zip(compared, calls.values(), strict=True):
            loss = None if row["by"] == LIMIT_OF_PRODUCTS else call()[0]
            rows.append(row if loss is None else {**row, "loss_error": (loss - truth).abs().item()})
    number, features, most = _QUICK_SWEEP if options.quick else _SWEEP
    columns = {"configuration": f"{number} rows, {features} features", "variable": "classes"}
    for classes in doublings(most, options.quick):
        tensors = tensors_of((number, features, classes), torch.float32)
        calls = {by: call for by, call in calls_of(tensors, options.quick).items() if by not in _NOT_SWEPT}
        rows += _compared(tensors, calls, options, size=classes, **columns)
    return rows


def _compared(tensors: Tensors, calls: Mapping[str, Call], options: argparse.Namespace, **columns: object) -> list[Row]:
    least_bytes = sum(tensor.nbytes for tensor in tensors[:2])
    return compare(calls, options.rounds, least_bytes=least_bytes, operator="linear_cross_entropy", **columns)


def _truth_of(tensors: Tensors) -> Tensor:
    """Compute the loss in float64, some rows at a time."""
    input, head, target = (tensor.detach() for tensor in tensors)
    head, losses = head.double(), []
    for rows in torch.arange(len(input)).split(_ROWS_OF_A_CHUNK):
        losses.append(theirs.cross_entropy(input[rows].double() @ head.T, target[rows], reduction="none"))
    return torch.cat(losses).mean()


def _measure_on_npu(options: argparse.Namespace) -> list[Row]:
    """Compare with the operators' entry points; the host NPU runs torch's operators on the host, so all wait for it."""
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
    return compare_on_npu(cases, options.rounds, wait=torch.npu.synchronize, **columns)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--npu", action="store_true", help="a small call on an NPU, or on the host NPU")
    options = arguments.parse_args()
    if options.npu:
        run("linear_cross_entropy_npu", _measure_on_npu, options, rounds=200)
    else:
        run("linear_cross_entropy", measure, options, rounds=5)
