"""The carrier of the arguments of one call of ``linear_cross_entropy``, from the function to the kernels."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

from torch_aclnn_ops._autograd.derivatives import scatter
from torch_aclnn_ops._checks import NON_NEGATIVE, OPTIONAL_POSITIVE, POSITIVE, check_number
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops.ops import _tiling as tiling
from torch_aclnn_ops.ops._head import has_bfloat16_units
from torch_aclnn_ops.ops._tiling import Sizes, Tiling
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Statistics

import torch
from torch import Tensor

NAME = "linear_cross_entropy"


class Call(NamedTuple):
    """One call: first as given, then with checked options, rows in one dimension, and what follows from both."""

    # Tensors as the function takes them; for kernels the input has shape (N, H), the weight (V, H), and the target
    # class indices, ``IGNORED`` or ``ELSEWHERE``, of shape (N,), or probabilities of shape (N, V).
    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor
    weight: Tensor | None = None
    token_weight: Tensor | None = None
    # Options of the function.
    reduction: str = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    softcap: Annotated[float | None, OPTIONAL_POSITIVE] = None
    lse_square_scale: Annotated[float, NON_NEGATIVE] = 0.0
    temperature: Annotated[float, POSITIVE] = 1.0
    zero_if_all_ignored: bool = False
    outputs: Collection[str] = ()
    chunk_size: int | None = None
    max_memory: int | None = None
    # What follows from them.
    shape: tuple[int, ...] = ()  # of class indices
    gradients: tuple[bool, bool, bool] = (False, False, False)  # which of input, linear_weight and linear_bias need one
    weighted: bool = False  # whether the weighted sum of each row's logits is needed, for label smoothing
    entropy: bool = False
    predicted_tokens: bool = False
    is_shard: bool = False  # whether the classes are a shard of a vocabulary
    # Whether CANN's operators compute the statistics, except for predicted tokens, and the gradients if those of both
    # input and linear_weight are needed. ``None`` in compiled code, which chooses when it runs.
    is_fused: bool | None = None
    # Statistics of the forward pass, in the backward pass.
    logits_max: Tensor | None = None
    log_sum_exp: Tensor | None = None

    def ignored_class(self) -> int:
        """Return the class index of ignored rows."""
        return -100 if self.ignore_index is None else int(self.ignore_index)

    def finite_softcap(self, dtype: torch.dtype) -> float | None:
        """Return the softcap, or ``None`` for one that is infinite in the logits' dtype, which changes nothing."""
        if self.softcap is None or self.softcap / min(self.temperature, 1) <= torch.finfo(dtype).max:
            return self.softcap
        return None

    def name(self, results: Sequence[Any]) -> Statistics:
        """Convert a sequence of the results that are needed to :class:`Statistics`."""
        return Statistics(*scatter((True, True, True, self.weighted, self.entropy, self.predicted_tokens), results))

    def tile_rows(self, rows: int | None = None, classes: int | None = None, with_gradients: bool = True) -> Tiling:
        """Choose chunks of rows; raise ``ValueError`` if ``max_memory`` is too small.

        Args:
            rows: Replaces the number of rows.
            classes: Replaces the number of classes of the head.
            with_gradients: Whether the gradients that are needed are computed too.
        """
        weight = self.linear_weight
        rows = self.input.shape[0] if rows is None else rows
        classes = weight.shape[0] if classes is None else classes
        sizes = Sizes(rows, classes, weight.shape[1], weight.dtype, weight.is_cpu)
        units = has_bfloat16_units(weight)
        # Tensors of the logits' size that are alive at the same time.
        copies = 1 + (self.softcap is not None) + self.entropy + 2 * self.target.is_floating_point()
        tile_rows = tiling.tile_rows if torch.compiler.is_compiling() else tiling.tile_rows_cached
        with_gradient = with_gradients and self.gradients[1]
        limits = self.chunk_size, self.max_memory
        return tile_rows(NAME, sizes, *limits, copies, with_gradient, units)

    def empty_statistics(self) -> list[Tensor]:
        """Return uninitialized tensors of the needed statistics, for fake tensors."""
        floats = [accumulation_dtype(self.input.dtype)] * (3 + self.weighted + self.entropy)
        dtypes = [*floats, *[torch.int64] * self.predicted_tokens]
        return [self.input.new_empty(self.input.shape[0], dtype=dtype) for dtype in dtypes]


# The rules of the numbers that PyTorch's function lacks.
_RULES = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Call, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
NUMBERS = tuple(_RULES)


def check_numbers(function: str, **given: Any) -> dict[str, Any]:
    """Check the types and ranges of numbers that PyTorch's function lacks, and return them as Python's numbers."""
    for name, value in given.items():
        if value is not None or Call._field_defaults[name] is not None:
            given[name] = check_number(function, name, value, _RULES[name])
    return given
