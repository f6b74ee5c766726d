"""The logits of a loss on a head, chunk by chunk: matrix products, and the rows that are not ignored."""

from collections.abc import Callable, Sequence
from typing import Any

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._cpu_extension import has_bfloat16_units as chip_has_bfloat16_units
from torch_aclnn_ops._tensors import accumulation_dtype, is_plain, widen
from torch_aclnn_ops.ops._tiling import Sizes, Tiling, slices

import torch
from torch import Tensor

Results = tuple[Tensor, ...]
HeadGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
# The target of an ignored row.
IGNORED = -1
# oneDNN compiles a kernel for each new shape in about 2 ms, the time of about 2^28 multiplications. A call has up to
# six shapes, which change with the number of ignored rows.
_FEWEST_MULTIPLICATIONS = 2**32


def has_bfloat16_units(weight: Tensor) -> bool:
    """Return whether a tensor is bfloat16 on a CPU with native bfloat16 matrix instructions."""
    return weight.dtype == torch.bfloat16 and weight.is_cpu and chip_has_bfloat16_units()


def has_logits_kernel(weight: Tensor, rows: int) -> bool:
    """Return whether csrc/cpu computes the logits: for large bfloat16 products on a CPU with native instructions."""
    return (
        has_bfloat16_units(weight)
        and weight.shape[1] % 2 == 0
        and weight.is_contiguous()
        and rows * weight.numel() >= _FEWEST_MULTIPLICATIONS
        and bool(torch.backends.mkldnn.enabled)
        and _cpu_extension.why_no_bfloat16_products() is None
    )


class Head:
    """The weight and bias of a linear layer, whose logits are multiplied by ``scale``."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float, rows: int) -> None:
        self.weight = weight
        self.bias = None if bias is None else widen(bias)
        self.scale = scale
        self.dtype = accumulation_dtype(weight.dtype)
        self.is_wide = weight.dtype == self.dtype
        # kernels cannot run on fake tensors
        is_real = is_plain(weight)
        self._has_logits_kernel = is_real and not self.is_wide and has_logits_kernel(weight, rows)
        self._has_bfloat16_units = not self.is_wide and has_bfloat16_units(weight)
        sizes = Sizes(rows, weight.shape[0], weight.shape[1], weight.dtype, weight.is_cpu)
        self._classes_per_block = sizes.classes_per_block

    def logits(self, input: Tensor, out: Tensor) -> Tensor:
        """Write ``scale * (input @ weight.T + bias)`` to ``out``."""
        if self._has_logits_kernel:
            input = input.to(self.weight.dtype).contiguous()
            torch.ops.torch_aclnn_ops.linear_cross_entropy_logits(input, self.weight, out)
            if self.bias is not None:
                out.add_(self.bias)
        elif self.is_wide and self.bias is None and out.shape[1] <= self._classes_per_block:
            torch.mm(input, self.weight.t(), out=out)
        else:
            wide_input = widen(input).contiguous()
            for block in slices(0, self.weight.shape[0], self._classes_per_block):
                columns, factor = out[:, block], widen(self.weight[block]).T
                if self.bias is None:
                    torch.mm(wide_input, factor, out=columns)
                else:
                    torch.addmm(self.bias[block], wide_input, factor, out=columns)
        return out if self.scale == 1 else out.mul_(self.scale)

    def write_input_gradient(self, grad_logits: Tensor, out: Tensor) -> None:
        """Write ``grad_logits @ weight`` to ``out``; bfloat16 instructions are accurate enough, as they round once."""
        if self._has_bfloat16_units:
            out.copy_(grad_logits.to(self.weight.dtype) @ self.weight)
        elif self.is_wide:
            torch.mm(grad_logits, self.weight, out=out)
        else:
            out.zero_()
            for block in slices(0, self.weight.shape[0], self._classes_per_block):
                out.addmm_(grad_logits[:, block], widen(self.weight[block]))

    def write_weight_gradient(self, grad_logits: Tensor, input: Tensor, out: Tensor, adds: bool) -> None:
        """Write ``grad_logits.T @ input``, in the dtype of ``grad_logits``, to ``out``, or add it if ``adds``."""
        factor = input if self.is_wide else input.to(grad_logits.dtype)
        if adds:
            out.addmm_(grad_logits.T, factor)
        elif out.dtype == factor.dtype:
            torch.mm(grad_logits.t(), factor, out=out)
        else:
            for block in slices(0, self.weight.shape[0], self._classes_per_block):
                out[block] = grad_logits[:, block].T @ factor


class Gradients:
    """Accumulates the needed gradients of input, weight and bias over the chunks of rows."""

    def __init__(self, input: Tensor, head: Head, tiling: Tiling, needed: tuple[bool, bool, bool]) -> None:
        needs_input, needs_weight, needs_bias = needed
        self._head = head
        self._input = input.new_empty(input.shape, dtype=head.dtype) if needs_input else None
        self._bias = head.weight.new_zeros(head.weight.shape[0], dtype=head.dtype) if needs_bias else None
        self._weight: Tensor | None = None
        self._kept: Tensor | None = None
        if needs_weight and tiling.keeps_gradients:
            self._kept = head.weight.new_empty((tiling.rows, tiling.classes))
            self._kept_input = input.to(head.weight.dtype)
        if needs_weight:
            # Sums over chunks are rounded to 16 bits once, at the end. A float16 gradient stays in float32 until it is
            # multiplied by the gradient of the loss: before loss scaling it could underflow.
            is_sum = self._kept is None and (tiling.rows > tiling.rows_per_chunk or head.weight.dtype == torch.float16)
            self._weight = head.weight.new_empty(head.weight.shape, dtype=head.dtype if is_sum else head.weight.dtype)

    def scratch(self, number: int) -> Tensor | None:
        """Return the memory of the weight's gradient for a number of logits, if it is unused until the end and fits."""
        if self._kept is None or self._weight is None:
            return None
        memory = self._weight.view(-1)[: number * self._head.dtype.itemsize // self._weight.itemsize]
        return memory.view(self._head.dtype) if memory.nbytes == number * self._head.dtype.itemsize else None

    def add(self, grad_logits: Tensor, input: Tensor, rows: slice) -> None:
        """Accumulate the contribution of a chunk of rows."""
        head = self._head
        if self._bias is not None:
            self._bias.add_(grad_logits.sum(0))
        if self._kept is not None:
            self._kept[rows] = grad_logits
            return
        if self._weight is not None:
            head.write_weight_gradient(grad_logits, input, self._weight, adds=rows.start > 0)
        if self._input is not None:
            head.write_input_gradient(grad_logits, part_of(self._input, rows))

    def finish(self) -> HeadGradients:
        """Return the gradients, in the dtype of the accumulators or of the arguments."""
        if self._kept is not None and self._weight is not None:
            if self._input is not None:
                self._head.write_input_gradient(self._kept, self._input)
            self._head.write_weight_gradient(self._kept, self._kept_input, self._weight, adds=False)
        return self._input, self._weight, self._bias


def part_of(values: Tensor, rows: slice) -> Tensor:
    """Return a range of rows; a tensor that has no others is returned unchanged, at no cost."""
    return values if rows.stop - rows.start == values.shape[0] else values[rows]


def logits_buffer(input: Tensor, head: Head, tiling: Tiling, total: Gradients | None = None) -> Tensor:
    """Return a buffer for the logits of a chunk: the memory of the weight's gradient, if it is unused."""
    shape = min(tiling.rows, tiling.rows_per_chunk), tiling.classes
    scratch = None if total is None else total.scratch(shape[0] * shape[1])
    return input.new_empty(shape, dtype=head.dtype) if scratch is None else scratch.view(shape)


class KeptRows:
    """The rows that are not ignored.

    Ignored rows, of the target ``IGNORED``, are dropped if finding them does not synchronize with a device. Otherwise
    they are set to zero, so that inf and nan in them do not reach sums in which their coefficient is 0. Without a
    target, no row is ignored.
    """

    def __init__(self, target: Tensor | None, rows: int) -> None:
        self._rows = rows
        self._kept: Tensor | None = None
        self._ignored: Tensor | None = None
        if target is None:
            return
        if not values_are_readable(target):
            self._ignored = target == IGNORED
        elif rows > 0 and int(target.min()) < 0:
            kept = (target != IGNORED).nonzero().squeeze(1)
            self._kept = kept if kept.shape[0] < rows else None

    @property
    def are_all(self) -> bool:
        """Whether it is known that no row is ignored."""
        return self._kept is None and self._ignored is None

    @property
    def have_labels(self) -> bool:
        """Whether it is known that the remaining rows have targets of 0 or more, unless those are in other shards."""
        return self._ignored is None

    @property
    def number(self) -> int:
        """The number of rows that are not dropped."""
        return self._rows if self._kept is None else self._kept.shape[0]

    def select(self, values: Any, rows: slice = slice(None)) -> Any:
        """Return the values, if any, of a range of the remaining rows, with zeros for ignored rows."""
        if values is None:
            return None
        if self.are_all and rows.start in (0, None) and rows.stop in (self._rows, None):
            return values
        if self._ignored is not None:
            return values[rows].masked_fill(_as_column(self._ignored[rows], values), 0)
        return values[rows] if self._kept is None else values[self._kept[rows]]

    def zero_ignored(self, values: Tensor, rows: slice) -> None:
        """Zero the values of ignored rows in-place; a no-op if they are dropped."""
        if self._ignored is not None:
            values.masked_fill_(_as_column(self._ignored[rows], values), 0)

    def expand_to_all_rows(self, values: Any, elsewhere: int = 0) -> Any:
        """Return the values of all rows, with ``elsewhere`` for ignored rows."""
        if values is None:
            return None
        if self._ignored is not None:
            return values.masked_fill(_as_column(self._ignored, values), elsewhere)
        if self._kept is None:
            return values
        return values.new_full((self._rows, *values.shape[1:]), elsewhere).index_copy_(0, self._kept, values)


def reduce_in_chunks(
    input: Tensor,
    head: Head,
    kept: KeptRows,
    tiling: Tiling,
    reduce_chunk: Callable[[Tensor, slice], Sequence[Results]],
    needed: tuple[bool, bool, bool] | None,
) -> tuple[Results, HeadGradients]:
    """Reduce the logits of all rows, and compute the gradients of input, weight and bias that are needed, if any.

    Given the logits of a chunk and its range of rows, ``reduce_chunk`` returns the results of its blocks. If gradients
    are needed, it overwrites the logits with their gradient.

    Returns:
        The results of all rows, 0 for ignored ones (-1 for integers), and the gradients: float32 for 16-bit tensors,
        except for that of a bfloat16 head that one product computes.
    """
    total = None
    if needed is not None:
        # Without keeps_gradients, Gradients uses the shape only, and add() gets the rows.
        rows_of_input = kept.select(input) if tiling.keeps_gradients else part_of(input, slice(0, kept.number))
        total = Gradients(rows_of_input, head, tiling, needed)
    buffer = logits_buffer(input, head, tiling, total)
    blocks: list[Results] = []
    for rows in tiling.chunks():
        chunk = kept.select(input, rows)
        logits = head.logits(chunk, part_of(buffer, slice(0, chunk.shape[0])))
        blocks += reduce_chunk(logits, rows)
        if total is not None:
            kept.zero_ignored(logits, rows)
            total.add(logits, chunk, rows)
    results = tuple([_all_rows(kept, column) for column in zip(*blocks, strict=True)])
    if total is None:
        return results, (None, None, None)
    input_grad, weight_grad, bias_grad = total.finish()
    return results, (kept.expand_to_all_rows(input_grad), weight_grad, bias_grad)


def blocks_of(rows: slice, size: int) -> list[slice]:
    """Split the rows of a chunk; there is at least one block, possibly empty."""
    return slices(rows.start, rows.stop, max(size, 1)) or [rows]


def _all_rows(kept: KeptRows, parts: Sequence[Tensor]) -> Tensor:
    values = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    found: Tensor = kept.expand_to_all_rows(values, 0 if values.is_floating_point() else -1)
    return found


def _as_column(rows: Tensor, values: Tensor) -> Tensor:
    return rows.reshape(-1, *(1,) * (values.dim() - 1))
