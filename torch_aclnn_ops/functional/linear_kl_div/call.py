"""The carrier of the arguments of one call of ``linear_kl_div``, and the chunks of its rows."""

from dataclasses import replace
from typing import NamedTuple

from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops._types import Divergence
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.ops._head import tiling
from torch_aclnn_ops.ops._head.products import has_bfloat16_units
from torch_aclnn_ops.ops._head.tiling import Sizes, Tiling

import torch
from torch import Tensor

NAME = "linear_kl_div"
_TEMPORARIES = 6  # of a block's size


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
    def temporaries(self) -> int:
        """The number of tensors of a block's size that a block needs at once."""
        return _TEMPORARIES if self.labels is None else _TEMPORARIES + 2

    @property
    def may_be_masked(self) -> bool:
        """Whether classes may have a probability of 0."""
        return self.linear_bias is not None or self.teacher_weight is None or self.teacher_bias is not None

    @property
    def classes(self) -> slice:
        """The classes of this process, in the vocabulary."""
        return slice(0, self.linear_weight.shape[0]) if self.shards is None else self.shards.own

    def tile_rows(self, rows: int, classes: int | None = None) -> Tiling:
        """Divide rows into chunks, or raise for a ``max_memory`` that is too small.

        Processes that share a vocabulary have one collective for each chunk, and so need the same chunks.
        """
        if self.shards is not None and classes is None:
            # torch.compile and gradients that differ between ranks must not make other chunks.
            common = self.tile_rows(rows, max(self.shards.sizes))
            here = self.linear_weight.shape[0]
            return replace(common, classes=here, keeps_gradients=False)
        weight, teacher = self.linear_weight, self.teacher_weight
        classes = weight.shape[0] if classes is None else classes
        beside = 0
        if teacher is not None:
            sizes = Sizes(rows, classes, teacher.shape[1], teacher.dtype, weight.is_cpu)
            block = tiling.tile_rows(NAME, sizes).classes_per_block
            beside = block * teacher.shape[1] * sizes.wide_itemsize if sizes.is_widened else 0
        copies = 1 if self.teacher_indices is not None else 2
        if weight.is_cpu and self.shards is None:
            beside += self.temporaries * self.rows_of_block(rows, classes) * classes * self.loss_dtype().itemsize
        else:
            copies += self.temporaries
        sizes = Sizes(rows, classes, weight.shape[1], weight.dtype, weight.is_cpu, beside)
        is_alone = self.shards is None
        with_gradient = self.gradients[1] if is_alone else True
        units = is_alone and has_bfloat16_units(weight)
        return tiling.tile_rows(NAME, sizes, self.chunk_size, self.max_memory, copies, with_gradient, units)

    def tile_teacher(self, cut: Tiling) -> Tiling:
        """Return the chunks of the teacher's head."""
        weight = self.teacher_weight
        assert weight is not None
        sizes = Sizes(cut.rows, weight.shape[0], weight.shape[1], weight.dtype, weight.is_cpu)
        return replace(cut, classes_per_block=tiling.tile_rows(NAME, sizes).classes_per_block)

    def rows_of_block(self, rows: int, classes: int) -> int:
        """Return how many rows of a chunk are reduced at once.

        All of them on a device, whose launches cost more than a cache saves, and where processes share a vocabulary,
        which have one collective for all of them.
        """
        if not self.linear_weight.is_cpu or self.shards is not None:
            return max(rows, 1)
        row = self.loss_dtype().itemsize
        most = min(rows, tiling.rows_of_block(classes, row), rows if self.chunk_size is None else self.chunk_size)
        if self.max_memory is not None:
            most = min(most, self.max_memory // (2 * self.temporaries * row * classes))
        return max(most, 1)

    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of the losses."""
        return accumulation_dtype(self.input.dtype)
