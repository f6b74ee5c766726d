"""The embedding lookup, with ``embedding_dense_backward`` as its backward kernel."""

from numbers import Integral
from typing import Any

from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled, NativeFunction
from torch_aclnn_ops._checks import describe, drop_in
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops.functional._drop_in import (
    call_torch_function,
    check_tensors,
    is_ordinary,
    on_one_device,
    overrides_torch,
)
from torch_aclnn_ops.ops import embedding_dense_backward
from torch_aclnn_ops.ops.embedding import check_indices

import torch
from torch import Tensor


def _formula(input: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    return torch.embedding(weight, input, padding_idx, scale_grad_by_freq)


class EmbeddingFunction(torch.autograd.Function):
    """Embedding lookup; ``padding_idx`` is the row that gets no gradient, or -1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
        """Look up the rows."""
        return _formula(input, weight, padding_idx, scale_grad_by_freq)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the indices; the gradient does not depend on the table."""
        input, weight, ctx.padding_idx, ctx.scale_grad_by_freq = inputs
        ctx.num_weights = weight.shape[0]
        ctx.save_for_backward(input)
        ctx.save_for_forward(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Call the raw operator."""
        (input,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        weight_gradient = embedding_dense_backward.apply(
            grad_output, input, ctx.num_weights, ctx.padding_idx, ctx.scale_grad_by_freq
        )
        return None, weight_gradient, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, weight_tangent: Tensor, *others: None) -> Tensor:
        """Look up the rows of the tangent."""
        (input,) = ctx.saved_tensors
        return _formula(input, weight_tangent, ctx.padding_idx, ctx.scale_grad_by_freq)


# PyTorch's kernel accumulates 16-bit gradients in 16 bits.
_NATIVE_DTYPES = (torch.float32, torch.float64)

_embedding = EagerOrCompiled(
    EmbeddingFunction,
    _formula,
    native=NativeFunction("embedding", embedding_dense_backward.why_not_dtype, _NATIVE_DTYPES),
)
_torch_embedding = torch.nn.functional.embedding


@drop_in
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of a table, a drop-in replacement for :func:`torch.nn.functional.embedding`.

    Gradients of a 16-bit table are accumulated in float32 and rounded once. The operator does not support sparse
    gradients: ``sparse=True`` falls back to PyTorch's function.

    Args:
        input: Indices into the table, int64 or int32, any shape.
        weight: The table, shape (num_embeddings, embedding_dim), floating point.
        padding_idx: A row that gets no gradient; negative values count from the end.
        max_norm: If given, looked-up rows with a larger norm are renormalized to it in place.
        norm_type: The p of the p-norm for ``max_norm``.
        scale_grad_by_freq: Divide each row's gradient by the number of occurrences of its index in this call.
        sparse: Return the gradient of ``weight`` as a sparse tensor.

    Returns:
        The embeddings, shape ``(*input.shape, embedding_dim)`` in weight's dtype.

    Raises:
        IndexError: An index is out of range (checked on the CPU).
        AssertionError: ``padding_idx`` is out of range.
        RuntimeError: ``weight`` is not 2-D, or ``input`` is neither int64 nor int32.

    Example:
        >>> weight = torch.arange(6.0).reshape(3, 2).requires_grad_()
        >>> rows = embedding(torch.tensor([2, 0, 2]), weight, padding_idx=0)
        >>> rows.sum().backward()
        >>> rows.tolist(), weight.grad.tolist()
        ([[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]], [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]])

    Source: backward kernel aclnnEmbeddingDenseBackward.
    """
    if not _is_supported(input, weight, padding_idx, sparse):
        check_tensors("embedding", input=input, weight=weight)
        if padding_idx is not None and not isinstance(padding_idx, Integral):
            raise TypeError(f"embedding: padding_idx must be None or an int, but it is {describe(padding_idx)}")
        return call_torch_function(
            _torch_embedding, input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    if padding_idx is None:
        padding_idx = -1
    elif padding_idx < 0:
        padding_idx += weight.shape[0]
    if not input.is_cpu:  # PyTorch checks on the CPU
        check_indices("embedding", input, weight.shape[0])
    if max_norm is not None:
        input = input.contiguous()
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input, max_norm, norm_type)
    rows: Tensor = _embedding(input, weight, padding_idx, scale_grad_by_freq)
    return rows


def _is_supported(input: Tensor, weight: Tensor, padding_idx: int | None, sparse: bool) -> bool:
    """Return whether the arguments are supported; PyTorch raises the errors for invalid ones."""
    if sparse is not False or is_disabled() or not is_ordinary(weight) or weight.dim() != 2:
        return False
    if type(input) is not Tensor and (not isinstance(input, Tensor) or overrides_torch(input)):
        return False
    if input.dtype not in (torch.int64, torch.int32) or input.is_nested:
        return False
    if not input.is_cpu or not weight.is_cpu:
        if input.device != weight.device and not on_one_device("embedding", input=input, weight=weight):
            return False
    if padding_idx is None:
        return True
    rows: int = weight.shape[0]
    return isinstance(padding_idx, (int, Integral)) and -rows <= padding_idx < max(rows, 1)
