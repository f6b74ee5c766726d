"""The matrix products of a linear cross entropy: logits of a chunk, and what their gradient adds to the arguments'."""

from collections.abc import Iterator, Sequence

from torch_aclnn_ops.ops._numerics import accumulation_dtype, widen
from torch_aclnn_ops.ops.linear_cross_entropy import _cpu
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Plan

import torch
from torch import Tensor


class Head:
    """The weight and bias of a linear layer, as the factors of products with chunks of rows.

    Args:
        weight: shape (V, H).
        bias: shape (V,), or ``None``.
        scale: factor of the logits.
        plan: tells the classes whose weights are widened at a time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float, plan: Plan) -> None:
        self.weight = weight
        self.bias = None if bias is None else widen(bias)
        self.scale = scale
        self.dtype = accumulation_dtype(weight.dtype)
        self._has_bfloat16_units = _cpu.has_bfloat16_units(weight)
        has_memory = type(weight) in (Tensor, torch.nn.Parameter)  # fake tensors have none
        self.has_row_kernels = has_memory and _cpu.has_row_kernels(weight)
        self._has_logits_kernel = has_memory and _cpu.has_logits_kernel(weight, plan.rows)
        self._classes_per_block = plan.classes_per_block

    def _blocks(self, classes: slice) -> Iterator[slice]:
        """Cut classes into those that a product takes at a time."""
        size = self._classes_per_block
        return (slice(start, min(start + size, classes.stop)) for start in range(classes.start, classes.stop, size))

    def logits(self, input: Tensor, classes: slice, out: Tensor) -> Tensor:
        """Write ``scale * (input @ weight.T + bias)`` to ``out``, for some classes."""
        if self._has_logits_kernel:
            _cpu.write_logits(input.to(self.weight.dtype).contiguous(), self.weight[classes], out)
            if self.bias is not None:
                out.add_(self.bias[classes])
        else:
            wide_input = widen(input).contiguous()
            for block in self._blocks(classes):
                columns = out[:, block.start - classes.start : block.stop - classes.start]
                factor = widen(self.weight[block]).T
                if self.bias is None:
                    torch.mm(wide_input, factor, out=columns)
                else:
                    torch.addmm(self.bias[block], wide_input, factor, out=columns)
        return out if self.scale == 1 else out.mul_(self.scale)

    def write_input_gradient(self, grad_logits: Tensor, out: Tensor) -> None:
        """Write ``grad_logits @ weight`` to ``out``; a result in bfloat16 is rounded once, so units may make it."""
        if self._has_bfloat16_units:
            out.copy_(grad_logits.to(self.weight.dtype) @ self.weight)
        elif self.weight.dtype == self.dtype:
            torch.mm(grad_logits, self.weight, out=out)
        else:
            out.zero_()
            for block in self._blocks(slice(0, self.weight.shape[0])):
                out.addmm_(grad_logits[:, block], widen(self.weight[block]))

    def write_weight_gradient(self, grad_logits: Tensor, input: Tensor, out: Tensor, adds: bool) -> None:
        """Write ``grad_logits.T @ input`` to ``out``, or add it; the product is in the dtype of ``grad_logits``."""
        factor = input.to(grad_logits.dtype)
        if adds:
            out.addmm_(grad_logits.T, factor)
        elif out.dtype == factor.dtype:
            torch.mm(grad_logits.T, factor, out=out)
        else:
            for block in self._blocks(slice(0, self.weight.shape[0])):
                out[block] = grad_logits[:, block].T @ factor


class Gradients:
    """The gradients of input, weight and bias, of which each chunk of rows makes a part.

    Args:
        input: shape (N, H).
        head: the weight and bias.
        plan: of the chunks.
        needed: whether the gradients of input, weight and bias are needed.
    """

    def __init__(self, input: Tensor, head: Head, plan: Plan, needed: Sequence[bool]) -> None:
        of_input, of_weight, of_bias = needed
        self._head = head
        self._input = input.new_zeros(input.shape, dtype=head.dtype) if of_input else None
        self._bias = head.weight.new_zeros(head.weight.shape[0], dtype=head.dtype) if of_bias else None
        self._weight: Tensor | None = None
        self._kept: Tensor | None = None
        self._placed: Tensor | None = None
        if of_weight and plan.keeps_gradients:
            self._kept = head.weight.new_empty((plan.rows, plan.classes))
            self._kept_input = input.to(head.weight.dtype)  # wider where its gradient is to be
        if of_weight:
            # Sums over chunks are rounded to 16 bits once, at the end. The gradient of float16 stays wide until it is
            # multiplied by the gradient of the loss, for instance a gradient scaler's factor, which keeps it from
            # underflow.
            is_sum = self._kept is None and (not plan.is_one_chunk or head.weight.dtype == torch.float16)
            self._weight = head.weight.new_empty(head.weight.shape, dtype=head.dtype if is_sum else head.weight.dtype)

    def free_memory(self, number: int) -> Tensor | None:
        """Return the memory of the weight's gradient, for numbers in the head's dtype, if it is free until the end.

        Args:
            number: how many are needed; ``None`` is returned where there is less.
        """
        if self._kept is None or self._weight is None:
            return None
        memory = self._weight.view(-1)[: number * self._head.dtype.itemsize // self._weight.itemsize]
        return memory.view(self._head.dtype) if memory.nbytes == number * self._head.dtype.itemsize else None

    def place(self, rows: slice, logits: Tensor) -> Tensor:
        """Return where the gradient of some rows' logits is best written: where it is kept, or over the logits."""
        self._placed = logits if self._kept is None else self._kept[rows]
        return self._placed

    def add(self, grad_logits: Tensor, input: Tensor, rows: slice) -> None:
        """Add the part of some rows, whose logits have the gradient ``grad_logits``."""
        head = self._head
        if self._bias is not None:
            self._bias.add_(grad_logits.sum(0))
        if self._kept is not None:
            if grad_logits is not self._placed:
                self._kept[rows] = grad_logits
            return
        if self._weight is not None:
            head.write_weight_gradient(grad_logits, input, self._weight, adds=rows.start > 0)
        if self._input is not None:
            head.write_input_gradient(grad_logits, self._input[rows])

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients, in the dtype of the sums or of the arguments."""
        if self._kept is not None and self._weight is not None:
            if self._input is not None:
                self._head.write_input_gradient(self._kept, self._input)
            self._head.write_weight_gradient(self._kept, self._kept_input, self._weight, adds=False)
        return self._input, self._weight, self._bias
