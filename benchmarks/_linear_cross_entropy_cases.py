"""The problems and the calls that benchmarks/linear_cross_entropy.py compares."""

from collections.abc import Callable
from functools import partial
from unittest import mock

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor
from torch.nn import functional as theirs
from torch.utils.checkpoint import checkpoint

from benchmarks._harness import LIMIT, OURS, absent, is_installed
from benchmarks._results import Row

NAIVE, TORCHS, LIGER = "cross_entropy(linear(...))", "torch, LinearCrossEntropyOptions()", "Liger's formula"
LIMIT_OF_PRODUCTS = f"{LIMIT}the matrix products alone"
# Not measured as memory and classes grow, where they do not differ from others or take too long.
NOT_SWEPT = (
    "torch, options=None",
    TORCHS,
    LIGER,
    "cut-cross-entropy, torch_compile",
    f"{OURS}, without compiled kernels",
)
_ROWS_OF_A_CHUNK = 256

Results = tuple[Tensor, ...]
Tensors = tuple[Tensor, Tensor, Tensor]


def tensors_of(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensors:
    """Make rows, head and targets; the logits are of variance 1."""
    rows, features, classes = shape
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(rows, features, generator=generator).to(dtype)
    head = torch.randn(classes, features, generator=generator).div_(features**0.5).to(dtype)
    return input.requires_grad_(), head.requires_grad_(), torch.randint(classes, (rows,), generator=generator)


def naive(input: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Compute the loss of all logits."""
    return theirs.cross_entropy(theirs.linear(input, head), target)


def _chunked(input: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Do what users without a fused loss do: the logits of some rows at a time, made again in the backward pass."""

    def sum_of(rows: Tensor, targets: Tensor) -> Tensor:
        return theirs.cross_entropy(theirs.linear(rows, head).float(), targets, reduction="sum")

    pairs = zip(input.split(_ROWS_OF_A_CHUNK), target.split(_ROWS_OF_A_CHUNK), strict=True)
    sums = [checkpoint(sum_of, rows, targets, use_reentrant=False) for rows, targets in pairs]
    return torch.stack(sums).sum() / len(target)


class LigersFormula(torch.autograd.Function):
    """Liger's formula in calls of torch, because its kernels need a GPU or an NPU.

    Loss and gradients of chunks of rows are computed in the forward pass. A chunk has about as many logits as the input
    has elements. As by Liger's default, logits, their gradient and the sum of the head's gradient have the dtype of the
    input; the loss, and what its kernel computes in between, are float32.
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
    """Return the loss of some of so many rows, and its gradient by the logits, which replaces them."""
    classes = target[:, None]
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, classes)).sum() / number
    gradient = logits.sub_(total).exp_()
    gradient.scatter_add_(1, classes, gradient.new_full(classes.shape, -1))
    return loss, gradient.div_(number)


def _losses(quick: bool) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {NAIVE: naive}
    if not quick:
        found["torch.compile of cross_entropy(linear(...))"] = torch.compile(naive, dynamic=True)
    found["cross_entropy(linear(...)) of 256 rows, checkpointed"] = _chunked
    if hasattr(theirs, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions
        of_512 = options(batch_chunk_size=512, chunking_method=None)
        found["torch, options=None"] = theirs.linear_cross_entropy
        found[TORCHS] = partial(theirs.linear_cross_entropy, options=options())
        found["torch, batch_chunk_size=512"] = partial(theirs.linear_cross_entropy, options=of_512)
    found[LIGER] = LigersFormula.apply
    if is_installed("cut_cross_entropy", "triton"):  # which it imports on Linux, used or not
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy, torch_compile"] = partial(linear_cross_entropy, impl="torch_compile")
    return {**found, OURS: ours.linear_cross_entropy}


def absences(**columns: object) -> list[Row]:
    """Return rows of the peers that cannot be measured here."""
    rows = []
    if not hasattr(theirs, "linear_cross_entropy"):
        rows.append(absent(TORCHS, f"torch {torch.__version__} does not have it yet", **columns))
    if not is_installed("cut_cross_entropy", "triton"):
        rows.append(absent("cut-cross-entropy, torch_compile", "it is not installed with triton", **columns))
    return rows


def calls_of(tensors: Tensors, quick: bool = False) -> dict[str, Callable[[], Results]]:
    """Make the calls that are compared, by name; each returns the loss and the gradients, the products nothing."""

    def forward_and_backward(function: Callable[..., Tensor]) -> Results:
        loss = function(*tensors)
        return loss.detach(), *torch.autograd.grad(loss, tensors[:2])

    calls = {name: partial(forward_and_backward, function) for name, function in _losses(quick).items()}
    calls[f"{OURS}, without compiled kernels"] = partial(_without_kernels, calls[OURS])
    return {**calls, LIMIT_OF_PRODUCTS: matrix_products(*tensors[:2])}


def _without_kernels(call: Callable[[], Results]) -> Results:
    """Make a call where csrc/cpu was not built, as far as it knows."""

    def reason() -> str:
        return "it was not built"

    with mock.patch.multiple(_cpu_extension, why_unavailable=reason, why_no_bfloat16_products=reason):
        return call()


def matrix_products(input: Tensor, head: Tensor, *teacher: Tensor) -> Callable[[], Results]:
    """Make the products that no loss can do without, into memory that is there."""
    input, head, *teacher = (tensor.detach() for tensor in (input, head, *teacher))
    logits = input.new_empty(len(input), len(head))
    input_grad, head_grad = torch.empty_like(input), torch.empty_like(head)

    def products() -> Results:
        if teacher:
            torch.mm(teacher[0], teacher[1].T, out=logits)
        torch.mm(input, head.T, out=logits)
        torch.mm(logits, head, out=input_grad)
        torch.mm(logits.T, input, out=head_grad)
        return ()

    return products


def errors(results: Results, truth: Results) -> dict[str, float]:
    """Return the error of the loss, and of the gradients in parts of their largest number."""
    if not results:
        return {}
    names = ("loss_error", "dx_error", "dw_error")
    sizes = (1.0, *(one.abs().max().item() for one in truth[1:]))
    found = zip(names, results, truth, sizes, strict=True)
    return {name: (one - exact).abs().max().item() / size for name, one, exact, size in found}


def truth_of(tensors: Tensors) -> Results:
    """Compute loss and gradients in float64 by the textbook's formula."""
    input, head, target = (tensor.detach() for tensor in tensors)
    head, dx = head.double(), torch.zeros(input.shape, dtype=torch.float64)
    loss, dw = torch.zeros((), dtype=torch.float64), torch.zeros_like(head)
    for rows in torch.arange(len(input)).split(_ROWS_OF_A_CHUNK):
        chunk, classes = input[rows].double(), target[rows, None]
        logits = chunk @ head.T
        loss -= logits.log_softmax(1).gather(1, classes).sum()
        logits = logits.softmax(1)
        logits.scatter_add_(1, classes, -torch.ones(classes.shape, dtype=torch.float64))
        dx[rows] = logits @ head
        dw.addmm_(logits.T, chunk)
    return tuple(tensor / len(input) for tensor in (loss, dx, dw))
