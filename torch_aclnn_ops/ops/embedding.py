"""``embedding_dense_backward``: the gradient of an embedding table (aclnnEmbeddingDenseBackward)."""

import math

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._checks import check_dtype, check_floating_point, values_are_readable, why_not_dtype
from torch_aclnn_ops._tensors import widen

import torch
from torch import Tensor

_NAME = "embedding_dense_backward"
_INDEX_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.float32,
    torch.float64,
)


def _check(grad_output: Tensor, indices: Tensor, num_weights: int, *_: object) -> None:
    check_floating_point(_NAME, grad_output=grad_output)
    check_dtype(_NAME, _INDEX_DTYPES, "", indices=indices)
    if grad_output.dim() == 0:
        raise ValueError(f"{_NAME}: grad_output must have at least 1 dimension, but its shape is []")
    rows = math.prod(grad_output.shape[:-1])
    if grad_output.shape[-1] != 0 and rows != indices.numel():
        raise ValueError(
            f"{_NAME}: grad_output must have one row per index, but its shape {list(grad_output.shape)} has {rows} rows"
            f" for {indices.numel()} indices"
        )
    if num_weights < 0:
        raise ValueError(f"{_NAME}: num_weights must be at least 0, but it is {num_weights}")


def _check_values(_grad_output: Tensor, indices: Tensor, num_weights: int, *_: object) -> None:
    check_indices(_NAME, indices, num_weights)


def check_indices(function: str, indices: Tensor, num_weights: int) -> None:
    """Raise for indices out of range, if values are readable; a device would write out of bounds."""
    if not values_are_readable(indices) or indices.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(indices))
    if smallest < 0 or largest >= num_weights:
        wrong = smallest if smallest < 0 else largest
        raise IndexError(
            f"{function}: indices must be from 0 to {num_weights - 1} (num_weights - 1), but one is {wrong}"
        )


def formula(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Accumulate each row of ``grad_output`` into the table row of its index, skipping ``padding_idx``."""
    dim = grad_output.shape[-1]
    rows = indices.reshape(-1).long()
    gradients = widen(grad_output).reshape(indices.numel(), dim)
    padding = (rows == padding_idx).unsqueeze(1)
    total = gradients.new_zeros(num_weights, dim).index_add(0, rows, torch.where(padding, 0, gradients))
    if scale_grad_by_freq:
        counts = gradients.new_zeros(num_weights).index_add(0, rows, torch.ones_like(rows, dtype=gradients.dtype))
        total = total / counts.clamp(min=1).unsqueeze(1)
    return total.to(grad_output.dtype)


def _limits(soc: str, grad_output: Tensor, *_: object) -> str | None:
    return why_not_dtype(soc, ("grad_output",), grad_output)


def _fake(grad_output: Tensor, _indices: Tensor, num_weights: int, *_: object) -> Tensor:
    return grad_output.new_empty(num_weights, grad_output.shape[-1])


def _cpu(grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    if indices.dtype not in (torch.int64, torch.int32):
        indices = indices.long()
    if grad_output.dtype in (torch.float32, torch.float64):
        native = torch.ops.aten.embedding_dense_backward.default
        gradient: Tensor = native(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
        return gradient
    if scale_grad_by_freq or grad_output.numel() == 0 or num_weights == 0:
        return formula(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
    return _sum_by_index(grad_output.reshape(indices.numel(), -1), indices.reshape(-1), num_weights, padding_idx)


def _sum_by_index(grad_rows: Tensor, indices: Tensor, num_weights: int, padding_idx: int) -> Tensor:
    """Accumulate 16-bit rows in float32, because PyTorch's kernel accumulates in 16 bits, where long sums stall.

    Sorted by index, the rows of one index form a bag for ``embedding_bag``, which accumulates in float32 registers and
    writes each 16-bit row of the table once.
    """
    order = torch.argsort(indices, stable=True)
    ends = torch.bincount(indices, minlength=num_weights).cumsum(0)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    total: Tensor = torch.embedding_bag(grad_rows.contiguous(), order, starts)[0]
    if 0 <= padding_idx < num_weights:
        total[padding_idx] = 0
    return total


embedding_dense_backward = RawOperator(
    "embedding_dense_backward(Tensor grad_output, Tensor indices, int num_weights, int padding_idx,"
    " bool scale_grad_by_freq) -> Tensor",
    cann="aclnnEmbeddingDenseBackward",
    limits=_limits,
    chips=("Ascend910", "Ascend910B", "Ascend910_93", "Ascend950"),
    check=_check,
    check_values=_check_values,
    formula=formula,
    fake=_fake,
    cpu=_cpu,
)
