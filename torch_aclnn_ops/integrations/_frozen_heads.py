"""The loss of a frozen head with adapters, which needs neither a copy nor a gradient of the head."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.ops._tiling import LOGITS_BYTES, Sizes, tile_rows

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits, what a softcap makes of them, their float32 copy, and its softmax and gradients.
_COPIES = 6


def cross_entropy(
    logits_of: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    head: Tensor,
    target: Tensor,
    *,
    chunk_size: Any,
    max_memory: int | None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross entropy of logits chunk by chunk, recomputing those of a chunk for its gradients.

    Args:
        logits_of: returns the logits of rows of ``inputs``.
        inputs: the inputs of the head and of its adapters, whose first dimension is the rows.
        head: the head's weight, for the size of the chunks.
        target: class indices.
        chunk_size: rows of a chunk, or ``"auto"``.
        max_memory: bytes of a chunk, instead.
        weight: as of :func:`torch.nn.functional.cross_entropy`, like the other options.
        ignore_index: a target that is ignored.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        label_smoothing: the share of the uniform distribution.
    """
    log_call("linear_cross_entropy", Implementation.FALLBACK, lambda: "the head is frozen and has adapters")
    sizes = Sizes(len(target), head.shape[0], head.shape[1], head.dtype, head.is_cpu)
    if chunk_size == "auto":
        chunk_size, max_memory = None, max_memory or max(LOGITS_BYTES, head.nbytes // 2)
    chunks = tile_rows("linear_cross_entropy", sizes, chunk_size, max_memory, _COPIES).chunks()
    options_of_rows: dict[str, Any] = {
        "weight": weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }

    def of_rows(target: Tensor, *inputs: Tensor) -> Tensor:
        logits = logits_of(*inputs)
        logits = logits.to(accumulation_dtype(logits.dtype))
        return torch.nn.functional.cross_entropy(logits, target, reduction="none", **options_of_rows)

    recomputed = partial(checkpoint, of_rows, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    losses = torch.cat([recomputed(target[rows], *(one[rows] for one in inputs)) for rows in chunks])
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    is_counted = target != ignore_index
    shares = is_counted if weight is None else weight[target.masked_fill(~is_counted, 0)] * is_counted
    return losses.sum() / shares.sum()
