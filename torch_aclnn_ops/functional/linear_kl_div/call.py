"""The carrier of the arguments of one call of ``linear_kl_div``, and the chunks of its rows."""

from dataclasses import replace
from typing import NamedTuple

from torch_aclnn_ops._checks import Divergence
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.ops import _tiling as tiling
from torch_aclnn_ops.ops._head import has_bfloat16_units
from torch_aclnn_ops.ops._tiling import Sizes, Tiling

import torch
from torch import Tensor

NAME = "linear_kl_div"
_TEMPORARIES = 6  # tensors of a block's size that a block needs at once; two more for labels


class Call(NamedTuple):
    """One call with checked arguments: rows in one dimension, and one teacher.

    The teacher's distribution of every row is that of a head; or probabilities of all classes, log-probabilities if
    ``is_log``; or log-probabilities of the classes at ``teacher_indices``, where the others share the rest.
    """

    input: Tensor  # shape (N, H)
    linear_weight: Tensor  # shape (V, H)
    linear_bias: Tensor | None  # shape (V,)
    target: Tensor | None  # ``IGNORED`` for an ignored row, else the label if it counts or 0, shape (N,)
    teacher_input: Tensor | None  # shape (N, H_t)
    teacher_weight: Tensor | None  # shape (V, H_t)
    teacher_bias: Tensor | None  # shape (V,)
    teacher_values: Tensor | None = None  # shape (N, V), or (N, k) with indices
    teacher_indices: Tensor | None = None  # shape (N, k)
    is_log: bool = True
    divergence: Divergence = "forward_kl"
    beta: float = 0.5  # the teacher's weight in the Jensen-Shannon divergence
    hard_weight: float = 0.0  # factor of the cross entropy of the labels, which is added
    temperature: float = 1.0
    chunk_size: int | None = None
    max_memory: int | None = None
    ignore_index: int = -100
    token_weight: Tensor | None = None  # shape of the rows
    reduction: str = "mean"
    zero_if_all_ignored: bool = False
    gradients: tuple[bool, bool, bool] = (False, False, False)  # which of input, linear_weight and linear_bias need one
    recomputes: bool = False  # whether the gradients alone are computed, in a backward pass
    shards: VocabularyShards | None = None  # how processes share the vocabulary, if they do
    reduce_input_grad: bool = True  # sum the gradient of the input over these processes

    @property
    def labels(self) -> Tensor | None:
        """The labels whose cross entropy is added, if it is."""
        return self.target if self.hard_weight else None

    @property
    def may_be_masked(self) -> bool:
        """Whether classes may have a probability of 0."""
        return self.linear_bias is not None or self.teacher_weight is None or self.teacher_bias is not None

    @property
    def classes(self) -> slice:
        """The classes of this process, in the vocabulary."""
        return slice(0, self.linear_weight.shape[0]) if self.shards is None else self.shards.own

    @property
    def has_small_blocks(self) -> bool:
        """Whether few rows of a chunk are reduced at once, which stay in a CPU's cache.

        Otherwise all of them are, on a device, whose launches cost more, and where processes share a vocabulary, which
        have one collective for all of them.
        """
        return self.linear_weight.is_cpu and self.shards is None

    def tile_rows(self, rows: int) -> Tiling:
        """Divide rows into chunks, or raise for a ``max_memory`` that is too small.

        Processes that share a vocabulary have one collective for each chunk, and so need the same chunks.
        """
        weight, is_shared = self.linear_weight, self.shards is not None
        classes = weight.shape[0] if self.shards is None else max(self.shards.sizes)
        copies = 1 if self.teacher_indices is not None else 2
        if not self.has_small_blocks:
            copies += _TEMPORARIES if self.labels is None else _TEMPORARIES + 2
        sizes = Sizes(rows, classes, weight.shape[1], weight.dtype, weight.is_cpu)
        limits = self.chunk_size, self.max_memory
        units = not is_shared and has_bfloat16_units(weight)
        found = tiling.tile_rows(NAME, sizes, *limits, copies, self.gradients[1] or is_shared, units)
        return replace(found, classes=weight.shape[0])

    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of the losses."""
        return accumulation_dtype(self.input.dtype)
