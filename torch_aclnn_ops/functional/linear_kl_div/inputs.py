"""Arguments of the kernels, and the chunks of their rows."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.functional.linear_kl_div.divergences import Measure
from torch_aclnn_ops.ops._head import tiling
from torch_aclnn_ops.ops._head.products import has_bfloat16_units
from torch_aclnn_ops.ops._head.tiling import LogitOptions, Sizes, Tiling

import torch
from torch import Tensor

NAME = "linear_kl_div"
_TEMPORARIES = 6  # of a block's size
_NO_GRADIENTS = (False, False, False)


class Teacher(NamedTuple):
    """The teacher's distribution of every row: a head, or probabilities of all classes, or log-probabilities of some.

    Attributes:
        input: rows of the head, shape (N, H_t).
        weight: of the head, shape (V, H_t).
        bias: of the head, shape (V,).
        values: probabilities, or log-probabilities if ``is_log``, shape (N, V); or (N, k) with indices.
        indices: classes of the values; the others share what is left of the probability.
        is_log: what ``values`` are.
    """

    input: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    values: Tensor | None = None
    indices: Tensor | None = None
    is_log: bool = True


@dataclass(frozen=True)
class Options:
    """The divergence, the options of the logits, and the gradients that are requested."""

    measure: Measure
    logits: LogitOptions
    gradients: tuple[bool, bool, bool] = _NO_GRADIENTS  # of input, linear_weight and linear_bias


class Inputs(NamedTuple):
    """The arguments of a call, the same for all its kernels."""

    input: Tensor  # shape (N, H)
    linear_weight: Tensor  # shape (V, H)
    linear_bias: Tensor | None  # shape (V,)
    teacher: Teacher
    target: Tensor | None  # ``IGNORED`` for an ignored row, else the label if it counts or 0, shape (N,)
    options: Options
    shards: VocabularyShards | None = None  # how processes share the vocabulary, if they do
    reduce_input_grad: bool = True  # sum the gradient of the input over these processes

    @property
    def student(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What a loss is differentiated by. Dynamo of torch before 2.12 does not trace slices of named tuples."""
        return self.input, self.linear_weight, self.linear_bias

    @property
    def labels(self) -> Tensor | None:
        """The labels whose cross entropy is added, if it is."""
        return self.target if self.options.measure.hard_weight else None

    @property
    def temporaries(self) -> int:
        """The number of tensors of a block's size that a block needs at once."""
        return _TEMPORARIES if self.labels is None else _TEMPORARIES + 2

    @property
    def may_be_masked(self) -> bool:
        """Whether classes may have a probability of 0."""
        return self.linear_bias is not None or self.teacher.weight is None or self.teacher.bias is not None

    @property
    def classes(self) -> slice:
        """The classes of this process, in the vocabulary."""
        if self.shards is None:
            return slice(0, self.linear_weight.shape[0])
        return self.shards.slices()[self.shards.members.rank]

    def tile(self, rows: int, classes: int | None = None) -> Tiling:
        """Divide rows into chunks, or raise for a ``max_memory`` that is too small.

        Processes that share a vocabulary have one collective for each chunk, and so need the same chunks.
        """
        if self.shards is not None and classes is None:
            # torch.compile and gradients that differ between ranks must not make other chunks.
            common = self.tile(rows, max(self.shards.sizes))
            here = self.linear_weight.shape[0]
            return replace(common, classes=here, keeps_gradients=False)
        weight, teacher = self.linear_weight, self.teacher.weight
        classes = weight.shape[0] if classes is None else classes
        beside = 0
        if teacher is not None:
            sizes = Sizes(rows, classes, teacher.shape[1], teacher.dtype, weight.is_cpu)
            block = tiling.tile_rows(sizes, LogitOptions()).classes_per_block
            beside = block * teacher.shape[1] * sizes.wide_itemsize if sizes.is_widened else 0
        copies = 1 if self.teacher.indices is not None else 2
        if weight.is_cpu and self.shards is None:
            beside += self.temporaries * self.rows_of_block(rows, classes) * classes * self.loss_dtype().itemsize
        else:
            copies += self.temporaries
        sizes = Sizes(rows, classes, weight.shape[1], weight.dtype, weight.is_cpu, beside)
        is_alone = self.shards is None
        with_gradient = self.options.gradients[1] if is_alone else True
        units = is_alone and has_bfloat16_units(weight)
        return tiling.tile_rows(sizes, self.options.logits, copies, with_gradient, units)

    def tile_teacher(self, cut: Tiling) -> Tiling:
        """Return the chunks of the teacher's head."""
        weight = self.teacher.weight
        assert weight is not None
        sizes = Sizes(cut.rows, weight.shape[0], weight.shape[1], weight.dtype, weight.is_cpu)
        return replace(cut, classes_per_block=tiling.tile_rows(sizes, LogitOptions()).classes_per_block)

    def rows_of_block(self, rows: int, classes: int) -> int:
        """Return how many rows of a chunk are reduced at once.

        All of them on a device, whose launches cost more than a cache saves, and where processes share a vocabulary,
        which have one collective for all of them.
        """
        if not self.linear_weight.is_cpu or self.shards is not None:
            return max(rows, 1)
        logits = self.options.logits
        row = self.loss_dtype().itemsize
        most = min(rows, tiling.rows_of_block(classes, row), rows if logits.chunk_size is None else logits.chunk_size)
        if logits.max_memory is not None:
            most = min(most, logits.max_memory // (2 * self.temporaries * row * classes))
        return max(most, 1)

    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of the losses."""
        return accumulation_dtype(self.input.dtype)
