"""The problems and the functions that benchmarks/linear_cross_entropy.py compares."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor
from torch.nn import functional as theirs

IGNORED = -100
LIMIT = "limit"
OURS = "ours"
LABELS = {
    "naive": "cross_entropy(linear(...))",
    "torch": "torch, options=None",
    "torch-auto": "torch, LinearCrossEntropyOptions()",
    "torch-128": "torch, batch_chunk_size=128",
    "torch-256": "torch, batch_chunk_size=256",
    "torch-512": "torch, batch_chunk_size=512",
    "cce": "cut-cross-entropy, torch_compile",
    OURS: "torch_aclnn_ops",
    LIMIT: "the matrix products alone",
}

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


def is_installed(case: str) -> bool:
    """Return whether what a case needs is there; on Linux cut-cross-entropy imports triton, used or not."""
    if case.startswith("torch"):
        return hasattr(theirs, "linear_cross_entropy")  # since torch 2.13
    return case != "cce" or all(map(importlib.util.find_spec, ("cut_cross_entropy", "triton")))


def make_call(case: str, tensors: tuple[Tensor, Tensor, Tensor], backward: bool) -> Callable[[], Results]:
    """Make the call that is measured.

    Args:
        case: a key of LABELS.
        tensors: rows, head and targets.
        backward: whether gradients are computed, or the loss alone under ``no_grad``.

    Returns:
        A call that returns the loss and the gradients of rows and head; the matrix products return nothing.
    """
    if case == LIMIT:
        return _matrix_products(tensors, backward)
    function = _loss(case)

    def forward() -> Results:
        with torch.no_grad():
            return (function(*tensors),)

    def forward_and_backward() -> Results:
        loss = function(*tensors)
        return loss.detach(), *torch.autograd.grad(loss, tensors[:2])

    return forward_and_backward if backward else forward


def _loss(case: str) -> Loss:
    if case == "naive":
        return lambda input, head, target: theirs.cross_entropy(theirs.linear(input, head), target)
    if case == "torch":
        return theirs.linear_cross_entropy
    if case == "torch-auto":
        return partial(theirs.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
    if case == "cce":
        from cut_cross_entropy import linear_cross_entropy

        return partial(linear_cross_entropy, impl="torch_compile")
    if case == OURS:
        return ours.linear_cross_entropy
    size = int(case.removeprefix("torch-"))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=size, chunking_method=None)
    return partial(theirs.linear_cross_entropy, options=options)


def _matrix_products(tensors: tuple[Tensor, Tensor, Tensor], backward: bool) -> Callable[[], Results]:
    """Make the products of the rows that are not ignored, which no loss can do without, into memory that is there."""
    input, head, target = tensors
    input, head = input.detach()[target != IGNORED], head.detach()
    logits = input.new_empty(len(input), len(head))
    input_grad, head_grad = torch.empty_like(input), torch.empty_like(head)

    def forward() -> Results:
        torch.mm(input, head.T, out=logits)
        return ()

    def forward_and_backward() -> Results:
        forward()
        torch.mm(logits, head, out=input_grad)
        torch.mm(logits.T, input, out=head_grad)
        return ()

    return forward_and_backward if backward else forward
