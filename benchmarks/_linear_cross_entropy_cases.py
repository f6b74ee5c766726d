"""The problems and the functions that benchmarks/linear_cross_entropy.py compares."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor
from torch.nn import functional as theirs
from torch.utils.checkpoint import checkpoint

from benchmarks._harness import LIMIT, OURS, is_installed

IGNORED = -100
WITHOUT_KERNELS = "without-kernels"
LABELS = {
    "naive": "cross_entropy(linear(...))",
    "compiled": "torch.compile of cross_entropy(linear(...))",
    "chunked": "cross_entropy(linear(...)) of 256 rows, checkpointed",
    "torch": "torch, options=None",
    "torch-auto": "torch, LinearCrossEntropyOptions()",
    "torch-512": "torch, batch_chunk_size=512",
    "liger": "Liger's formula",
    "cce": "cut-cross-entropy, torch_compile",
    OURS: OURS,
    WITHOUT_KERNELS: f"{OURS}, without compiled kernels",
    "limit": f"{LIMIT}the matrix products alone",
}
_ROWS_OF_A_CHUNK = 256

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """A problem of N rows, D features and V classes; its tensors are the same in every process.

    Args:
        shape: N, D, V.
        dtype: name of the dtype of rows and head.
        ignored: share of the rows whose target is ignored.
    """

    shape: tuple[int, int, int]
    dtype: str
    ignored: float

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients of rows and head, the least that a loss has to allocate."""
        rows, features, classes = self.shape
        return (rows + classes) * features * getattr(torch, self.dtype).itemsize

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Make rows, head and targets; the logits are of variance 1."""
        rows, features, classes = self.shape
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, self.dtype)
        input = torch.randn(rows, features, generator=generator).to(dtype)
        head = torch.randn(classes, features, generator=generator).div_(features**0.5).to(dtype)
        target = torch.randint(classes, (rows,), generator=generator)
        target[torch.rand(rows, generator=generator) < self.ignored] = IGNORED
        return input.requires_grad_(), head.requires_grad_(), target


def why_absent(case: str) -> str | None:
    """Return why a case cannot be measured here, or ``None``."""
    if case.startswith("torch-") or case == "torch":
        return None if hasattr(theirs, "linear_cross_entropy") else f"torch {torch.__version__} does not have it yet"
    # On Linux cut-cross-entropy imports triton, used or not.
    missing = [package for package in ("cut_cross_entropy", "triton") if case == "cce" and not is_installed(package)]
    return f"{' and '.join(missing)} not installed" if missing else None


def make_call(case: str, tensors: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Results]:
    """Make the call that is measured.

    Args:
        case: a key of LABELS.
        tensors: rows, head and targets.

    Returns:
        A call that returns the loss and the gradients of rows and head; the matrix products return nothing.
    """
    if case == "limit":
        return _matrix_products(tensors)
    function = _loss(case)

    def forward_and_backward() -> Results:
        loss = function(*tensors)
        return loss.detach(), *torch.autograd.grad(loss, tensors[:2])

    return _without_kernels(forward_and_backward) if case == WITHOUT_KERNELS else forward_and_backward


def _without_kernels(call: Callable[[], Results]) -> Callable[[], Results]:
    """Make the call where csrc/cpu was not built, as far as it knows."""

    def reason() -> str:
        return "it was not built"

    def run() -> Results:
        with mock.patch.multiple(_cpu_extension, why_unavailable=reason, why_no_bfloat16_products=reason):
            return call()

    return run


def _loss(case: str) -> Loss:
    if case in ("naive", "compiled"):
        return _naive if case == "naive" else torch.compile(_naive, dynamic=True)
    if case == "chunked":
        return _chunked
    if case == "torch":
        return theirs.linear_cross_entropy
    if case == "torch-auto":
        return partial(theirs.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
    if case == "cce":
        from cut_cross_entropy import linear_cross_entropy

        return partial(linear_cross_entropy, impl="torch_compile")
    if case == "liger":
        return LigersFormula.apply
    if case in (OURS, WITHOUT_KERNELS):
        return ours.linear_cross_entropy
    size = int(case.removeprefix("torch-"))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=size, chunking_method=None)
    return partial(theirs.linear_cross_entropy, options=options)


def _naive(input: Tensor, head: Tensor, target: Tensor) -> Tensor:
    return theirs.cross_entropy(theirs.linear(input, head), target)


def _chunked(input: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Do what users without a fused loss do: the logits of some rows at a time, made again in the backward pass."""

    def sum_of(rows: Tensor, targets: Tensor) -> Tensor:
        return theirs.cross_entropy(theirs.linear(rows, head).float(), targets, reduction="sum")

    pairs = zip(input.split(_ROWS_OF_A_CHUNK), target.split(_ROWS_OF_A_CHUNK), strict=True)
    sums = [checkpoint(sum_of, rows, targets, use_reentrant=False) for rows, targets in pairs]
    return torch.stack(sums).sum() / (target != IGNORED).sum()


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
        number = (target != IGNORED).sum()
        loss = input.new_zeros((), dtype=torch.float32)
        input_grad, head_grad = torch.empty_like(input), torch.zeros_like(head)
        for begin in range(0, rows, size):
            part = input[begin : begin + size]
            of_part, logits_grad = _with_gradient((part @ head.T).float(), target[begin : begin + size], number)
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


def _with_gradient(logits: Tensor, target: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of some of so many rows, and its gradient by the logits, which replaces them."""
    counted = target != IGNORED
    classes = target.where(counted, 0)[:, None]
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, classes))[counted].sum() / number
    gradient = logits.sub_(total).exp_()
    gradient.scatter_add_(1, classes, gradient.new_full(classes.shape, -1))
    return loss, gradient.mul_(counted[:, None] / number)


def _matrix_products(tensors: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Results]:
    """Make the products of the rows that are not ignored, which no loss can do without, into memory that is there."""
    input, head, target = tensors
    input, head = input.detach()[target != IGNORED], head.detach()
    logits = input.new_empty(len(input), len(head))
    input_grad, head_grad = torch.empty_like(input), torch.empty_like(head)

    def forward_and_backward() -> Results:
        torch.mm(input, head.T, out=logits)
        torch.mm(logits, head, out=input_grad)
        torch.mm(logits.T, input, out=head_grad)
        return ()

    return forward_and_backward
