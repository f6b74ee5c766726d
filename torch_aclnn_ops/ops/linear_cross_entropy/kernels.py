"""The choice of kernels for the linear cross entropy: CANN's fused operators if they support a call, else chunks.

The choice is made once per call and applies to its gradients too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch_aclnn_ops import _cpu_extension, _extension
from torch_aclnn_ops._call_log import Implementation, is_explaining, log_call, log_detail
from torch_aclnn_ops._switch import is_disabled, why_disabled
from torch_aclnn_ops.ops._head import products
from torch_aclnn_ops.ops._head.tiling import Tiling
from torch_aclnn_ops.ops.linear_cross_entropy import chunks
from torch_aclnn_ops.ops.linear_cross_entropy.fused import fused_gradients, fused_statistics
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, PlainLoss
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients, Statistics

import torch
from torch import Tensor

_NAME = "linear_cross_entropy"
_REDUCTIONS = {"mean": 1, "sum": 2}  # numbers in at::Reduction


@dataclass(frozen=True)
class Kernels:
    """The kernels chosen by :func:`choose_kernels` for the statistics of a call and their gradients.

    Attributes:
        why_not_fused: Why CANN's fused operators do not compute the statistics, or ``None`` if they do.
        fuses_gradients: Whether they compute the gradients if those of both input and weight are needed.
    """

    why_not_fused: str | None
    fuses_gradients: bool

    def statistics(self, inputs: Inputs) -> Statistics:
        """Reduce the logits of every row."""
        if self.why_not_fused is None:
            return fused_statistics(inputs)
        _check_queue(inputs)
        log_call(
            _NAME,
            _in_chunks(inputs),
            lambda: f"{self.why_not_fused}; {_describe(inputs, inputs.tile_statistics())}",
        )
        if is_explaining():
            return inputs.requested.name(inputs.empty_statistics())
        return chunks.statistics_in_chunks(inputs)

    def gradients(
        self, inputs: Inputs, grad_statistics: Statistics, log_sum_exp: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the requested gradients of input, weight and bias.

        ``grad_statistics`` has the maximum itself in place of its gradient, and ``entropy`` is the statistic if its
        gradient is given.
        """
        if self.fuses_gradients:
            # The operator always computes both gradients.
            if all(inputs.requested.gradients[:2]):
                return *fused_gradients(inputs, grad_statistics, log_sum_exp), None
            name = fused_linear_cross_entropy_loss_grad.name
            log_call(name, Implementation.FALLBACK, lambda: "only one of the two gradients is needed")
        _check_queue(inputs)
        log_detail(_NAME, lambda: f"logits recomputed for the gradients; {_describe(inputs, inputs.tile_rows())}")
        if is_explaining():
            return tuple(inputs.empty_gradients(log_sum_exp))
        return chunks.gradients_in_chunks(inputs, grad_statistics, entropy)


def choose_kernels(inputs: Inputs) -> Kernels:
    """Choose the kernels for the statistics of these inputs and their gradients."""
    reason = _why_not_by_feature(inputs)
    if reason is None and inputs.requested.predicted_tokens:
        return Kernels("predicted tokens are requested", _why_not_cann(inputs) is None)
    if reason is None:
        reason = _why_not_cann(inputs)
    return Kernels(reason, reason is None)


def _why_not_by_feature(inputs: Inputs) -> str | None:
    if inputs.input.device.type != "npu":
        return f"the tensors are on {inputs.input.device.type}"
    if is_disabled():
        return why_disabled()
    options, requested = inputs.options, inputs.requested
    reasons = (
        ("of linear_bias", inputs.linear_bias is not None),
        ("of softcap", options.softcap is not None),
        ("of temperature", options.temperature != 1),
        ("of chunk_size", options.chunk_size is not None),
        ("of max_memory", options.max_memory is not None),
        ("the targets are probabilities", inputs.target.is_floating_point()),
        ("of label_smoothing", requested.weighted),
        ("entropy is requested", requested.entropy),
    )
    for reason, holds in reasons:
        if holds:
            return reason
    return None


def _why_not_cann(inputs: Inputs) -> str | None:
    weight = inputs.linear_weight
    return fused_linear_online_max_sum.why_not_cann(inputs.input, weight, inputs.target, 0, weight.shape[0], False)


def loss_and_gradients(
    inputs: Inputs, coefficients: Coefficients
) -> tuple[Tensor, Sequence[Tensor | None], Tensor | None]:
    """Compute the sum of the losses, the gradients of input, weight and bias, and the predicted tokens, in chunks."""
    _check_queue(inputs)
    log_call(_NAME, _in_chunks(inputs), lambda: _describe_call(inputs, "gradients computed in the forward pass"))
    if is_explaining():
        empty = inputs.requested.name(inputs.empty_statistics())
        loss = empty.logits_max.new_empty(())
        return loss, inputs.empty_gradients(loss), empty.predicted_tokens
    return chunks.loss_in_chunks(inputs, coefficients)


def has_small_loss_kernel(weight: Tensor) -> bool:
    """Return whether the extension of a head's device has a kernel for small losses."""
    if weight.is_cpu:
        return _cpu_extension.why_unavailable() is None
    return _NAME in _extension.functions and weight.device.type == "npu" and not _extension.checks_values()


def small_loss_and_gradients(
    inputs: Inputs, loss: PlainLoss
) -> tuple[Tensor | None, Sequence[Tensor | None], Tensor | None]:
    """Compute a small loss and its gradients on the CPU; the loss is ``None`` if a target is invalid or ignored."""
    input, weight, (needs_input, needs_weight, _) = inputs.input, inputs.linear_weight, inputs.requested.gradients
    kernel, is_mean = torch.ops.torch_aclnn_ops.linear_cross_entropy_loss, loss.reduction == "mean"
    value, *made = kernel(input, weight, inputs.target, loss.ignore_index, is_mean, needs_input, needs_weight)
    if value.dim():  # the kernel returned no scalar: another implementation has to compute the call
        return None, (*made, None), None
    log_call(_NAME, Implementation.KERNELS, lambda: _describe_call(inputs, "gradients computed in the forward pass"))
    return value, (*made, None), None


def small_loss_on_npu(inputs: Inputs, loss: PlainLoss) -> Tensor | None:
    """Compute a small loss on an NPU with a C++ autograd function; return ``None`` inside a ``TorchFunctionMode``."""
    input, weight, reduction = inputs.input, inputs.linear_weight, _REDUCTIONS[loss.reduction]
    value: Tensor | None
    if is_explaining():
        value = loss.of_all_logits(input, weight, inputs.target)
    else:
        value = _npu_function()(input, weight, inputs.target, loss.ignore_index, reduction)
    if value is not None:
        log_call(_NAME, Implementation.FALLBACK, lambda: _describe_few_logits(inputs))
    return value


@cache
def _npu_function() -> Any:
    return _extension.functions[_NAME](lambda *_: None, (torch.float32,))


def _describe_few_logits(inputs: Inputs) -> str:
    rows = inputs.input.shape[0]
    return f"{choose_kernels(inputs).why_not_fused}; few logits: all {rows} rows in one chunk"


def _in_chunks(inputs: Inputs) -> Implementation:
    """Return the implementation that computes a call in chunks of rows."""
    return Implementation.KERNELS if products.has_row_kernels(inputs.linear_weight) else Implementation.FALLBACK


def _describe_call(inputs: Inputs, how: str) -> str:
    reason = choose_kernels(inputs).why_not_fused
    return f"{reason}; {how}; {_describe(inputs, inputs.tile_rows())}"


def _describe(inputs: Inputs, tiling: Tiling) -> str:
    return f"{tiling}{products.describe_backend(inputs.linear_weight, tiling.rows)}"


def _check_queue(inputs: Inputs) -> None:
    """Raise if torch_npu's task queue has stopped, because it would silently drop the work of the PyTorch fallback."""
    if inputs.input.device.type == "npu":
        _extension.check_queue(_NAME)
