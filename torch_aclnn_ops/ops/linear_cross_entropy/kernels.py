"""The choice of kernels for the linear cross entropy: CANN's fused operators if they support a call, else chunks.

The choice is made once per call and applies to its gradients too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_aclnn_ops import _extension
from torch_aclnn_ops._call_log import Implementation, is_explaining, log_call, log_detail
from torch_aclnn_ops._switch import is_disabled, why_disabled
from torch_aclnn_ops.ops._head import products
from torch_aclnn_ops.ops._head.tiling import Tiling
from torch_aclnn_ops.ops.linear_cross_entropy import chunks
from torch_aclnn_ops.ops.linear_cross_entropy.fused import fused_gradients, fused_statistics
from torch_aclnn_ops.ops.linear_cross_entropy.grad import fused_linear_cross_entropy_loss_grad
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs
from torch_aclnn_ops.ops.linear_cross_entropy.max_sum import fused_linear_online_max_sum
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Coefficients, Statistics

from torch import Tensor

_NAME = "linear_cross_entropy"


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
            Implementation.FALLBACK,
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
    log_call(_NAME, Implementation.FALLBACK, lambda: _describe_call(inputs, "gradients computed in the forward pass"))
    if is_explaining():
        empty = inputs.requested.name(inputs.empty_statistics())
        loss = empty.logits_max.new_empty(())
        return loss, inputs.empty_gradients(loss), empty.predicted_tokens
    return chunks.loss_in_chunks(inputs, coefficients)


def log_few_logits(inputs: Inputs) -> None:
    """Log a call whose logits are computed all at once, in torch calls."""
    _check_queue(inputs)
    reason, rows = choose_kernels(inputs).why_not_fused, inputs.input.shape[0]
    log_call(_NAME, Implementation.FALLBACK, lambda: f"{reason}; few logits: all {rows} rows in one chunk")


def _describe_call(inputs: Inputs, how: str) -> str:
    reason = choose_kernels(inputs).why_not_fused
    return f"{reason}; {how}; {_describe(inputs, inputs.tile_rows())}"


def _describe(inputs: Inputs, tiling: Tiling) -> str:
    return f"{tiling}{products.describe_backend(inputs.linear_weight, tiling.rows)}"


def _check_queue(inputs: Inputs) -> None:
    """Raise if torch_npu's task queue has stopped, because it would silently drop the work of the PyTorch fallback."""
    if inputs.input.device.type == "npu":
        _extension.check_queue(_NAME)
