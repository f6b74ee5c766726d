"""The matrix products of a loss on a head: the logits of a chunk, and the gradients of the arguments."""

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops._cpu_extension import has_bfloat16_units as chip_has_bfloat16_units
from torch_aclnn_ops._tensors import accumulation_dtype, widen
from torch_aclnn_ops.ops._head.tiling import Sizes, Tiling, slices

import torch
from torch import Tensor

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
        self.dtype = torch.float32 if weight.dtype == torch.float32 else accumulation_dtype(weight.dtype)
        self.is_wide = weight.dtype == self.dtype
        # kernels cannot run on fake tensors
        is_real = type(weight) in (Tensor, torch.nn.Parameter)
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
        factor = input.to(grad_logits.dtype)
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
        """Return the memory of the weight's gradient as a buffer of the logits' dtype, if it is unused until the end.

        Args:
            number: The number of elements needed; returns ``None`` if the memory is too small.
        """
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
            head.write_input_gradient(grad_logits, self._input[rows])

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients, in the dtype of the accumulators or of the arguments."""
        if self._kept is not None and self._weight is not None:
            if self._input is not None:
                self._head.write_input_gradient(self._kept, self._input)
            self._head.write_weight_gradient(self._kept, self._kept_input, self._weight, adds=False)
        return self._input, self._weight, self._bias


def logits_buffer(input: Tensor, head: Head, tiling: Tiling, total: Gradients | None = None) -> Tensor:
    """Return a buffer for the logits of a chunk: the memory of the weight's gradient, if it is unused."""
    number = min(tiling.rows, tiling.rows_per_chunk) * tiling.classes
    scratch = None if total is None else total.scratch(number)
    return input.new_empty(number, dtype=head.dtype) if scratch is None else scratch
