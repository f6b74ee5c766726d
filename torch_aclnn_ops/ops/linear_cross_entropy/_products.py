"""The matrix products of a linear cross entropy: logits of a chunk, and what their gradient adds to the arguments'."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_aclnn_ops.ops._numerics import accumulation_dtype, widen
from torch_aclnn_ops.ops.linear_cross_entropy import _buffers, _compiled, _gemm
from torch_aclnn_ops.ops.linear_cross_entropy._plan import Plan

import torch
from torch import Tensor

_precision_lock = threading.Lock()
_MODULES_THAT_ONLY_WAIT = ("tqdm.", "torch.utils.data.", "torch._inductor.", "multiprocessing.")


def has_bfloat16_units(tensor: Tensor) -> bool:
    """Return whether the CPU multiplies bfloat16 numbers faster than float32 ones, and the tensor has such numbers."""
    if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16"))


@contextmanager
def bfloat16_products(enabled: bool) -> Iterator[None]:
    """Let float32 matrix products round their factors to bfloat16, and add up in float32.

    For factors that have bfloat16 values the products are those of float32, on the units for bfloat16. The setting is
    one for the whole process, so it stays as it is where another thread could multiply matrices at the same time.
    """
    if not enabled or not torch.backends.mkldnn.is_available() or _is_beside_other_threads():
        yield
        return
    with _precision_lock:
        setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = setting.fp32_precision
        setting.fp32_precision = "bf16"
        try:
            yield
        finally:
            setting.fp32_precision = before


def _is_beside_other_threads() -> bool:
    """Return whether another thread of Python may compute; those of progress bars and data loaders do not."""
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return any(not _module_of(thread).startswith(_MODULES_THAT_ONLY_WAIT) for thread in others)


def _module_of(thread: threading.Thread) -> str:
    """Return the module that a thread was started for: that of its class, or of its target."""
    cls = type(thread)
    origin = getattr(thread, "_target", None) if cls is threading.Thread else cls
    return getattr(origin, "__module__", None) or ""


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
        self.has_bfloat16_units = has_bfloat16_units(weight)
        has_memory = type(weight) in (Tensor, torch.nn.Parameter)  # fake tensors have none
        self.prefers_onednn = has_memory and _gemm.prefers_onednn(weight, self.dtype, plan.rows)
        self._kernel_dtypes = [
            dtype
            for dtype in (weight.dtype, self.dtype)
            if has_memory and _gemm.has_logits_kernel(weight, dtype, plan.rows)
        ]
        self.has_kernel = bool(self._kernel_dtypes)
        # What oneDNN returns is memory beside the result, and the allocator keeps several of them.
        self._step = max(plan.classes_per_block // 2, 1) if self.prefers_onednn else plan.classes_per_block

    def blocks(self, classes: slice) -> Iterator[slice]:
        """Cut classes into those that a product takes at a time."""
        starts = range(classes.start, classes.stop, self._step)
        return (slice(start, min(start + self._step, classes.stop)) for start in starts)

    def logits(self, input: Tensor, classes: slice, out: Tensor) -> Tensor:
        """Write ``scale * (input @ weight.T + bias)`` to ``out``, for some classes."""
        if self.weight.dtype in self._kernel_dtypes:
            self._write_logits(input.to(self.weight.dtype).contiguous(), self.weight[classes], classes, out)
        else:
            wide_input = widen(input).contiguous()
            with bfloat16_products(self.has_bfloat16_units and self.dtype not in self._kernel_dtypes):
                for block in self.blocks(classes):
                    columns = out[:, block.start - classes.start : block.stop - classes.start]
                    self._write_logits(wide_input, widen(self.weight[block]), block, columns)
        return out if self.scale == 1 else out.mul_(self.scale)

    def _write_logits(self, input: Tensor, weight: Tensor, classes: slice, out: Tensor) -> None:
        if weight.dtype in self._kernel_dtypes:
            _compiled.write_logits(input, weight, out)
            if self.bias is not None:
                out.add_(self.bias[classes])
        elif self.bias is None:
            torch.mm(input, weight.T, out=out)
        else:
            torch.addmm(self.bias[classes], input, weight.T, out=out)

    def input_gradient(self, grad_logits: Tensor) -> Tensor:
        """Return ``grad_logits @ weight``."""
        if self.has_bfloat16_units:
            return grad_logits.to(self.weight.dtype) @ self.weight
        if self.weight.dtype == self.dtype:
            return _gemm.linear(grad_logits, self.weight.T) if self.prefers_onednn else grad_logits @ self.weight
        gradient = grad_logits.new_zeros(grad_logits.shape[0], self.weight.shape[1])
        for block in self.blocks(slice(0, self.weight.shape[0])):
            factor = widen(self.weight[block])
            if self.prefers_onednn:
                gradient.add_(_gemm.linear(grad_logits[:, block], factor.T))
            else:
                gradient.addmm_(grad_logits[:, block], factor)
        return gradient


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
            self._kept = _buffers.empty((plan.rows, plan.classes), head.weight, head.weight.dtype)
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
            self._add_to_weight(self._weight, grad_logits, input, is_first=rows.start == 0)
        if self._input is not None:
            self._input[rows] = head.input_gradient(grad_logits)

    def _add_to_weight(self, total: Tensor, grad_logits: Tensor, input: Tensor, is_first: bool) -> None:
        wide_input = widen(input)
        if self._head.prefers_onednn:
            # input.T is copied, which is less than grad_logits.T.
            transposed = wide_input.T.contiguous()
            for block in self._head.blocks(slice(0, total.shape[0])):
                part = _gemm.linear(transposed, grad_logits[:, block].contiguous().T).T
                if is_first:
                    total[block] = part
                else:
                    total[block] += part
        elif total.dtype == self._head.dtype:
            with bfloat16_products(self._head.has_bfloat16_units):
                if is_first:
                    torch.mm(grad_logits.T, wide_input, out=total)
                else:
                    total.addmm_(grad_logits.T, wide_input)
        else:
            for block in self._head.blocks(slice(0, total.shape[0])):
                total[block] = grad_logits[:, block].T @ wide_input

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients, in the dtype of the sums or of the arguments."""
        if self._kept is not None:
            if self._input is not None:
                self._input.copy_(self._head.input_gradient(self._kept))
            torch.mm(self._kept.T, self._kept_input, out=self._weight)
        return self._input, self._weight, self._bias
