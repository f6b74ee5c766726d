"""Small losses in few calls, which hold all logits: chunks take their time for them."""

from functools import cache
from typing import Any

from torch_aclnn_ops import _cpu_extension, _extension
from torch_aclnn_ops._torch_compat import get_enum
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, PlainLoss

import torch
from torch import Tensor

_NPU_FUNCTION = "linear_cross_entropy"


def has_kernel(weight: Tensor) -> bool:
    """Return whether there is a kernel for a head in the extension of its device."""
    if weight.is_cpu:
        return _cpu_extension.why_unavailable() is None
    return _NPU_FUNCTION in _extension.functions and weight.device.type == "npu" and not _extension.checks_values()


def on_cpu(inputs: Inputs, loss: PlainLoss) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """Compute a loss and its gradients, or ``None`` as the loss where a target is no class or is ignored."""
    input, weight, (needs_input, needs_weight, _) = inputs.input, inputs.linear_weight, inputs.requested.gradients
    kernel, is_mean = torch.ops.torch_aclnn_ops.linear_cross_entropy_loss, loss.reduction == "mean"
    value, *made = kernel(input, weight, inputs.target, loss.ignore_index, is_mean, needs_input, needs_weight)
    return value if value.dim() == 0 else None, (*made, None)


@cache
def _npu_function() -> Any:
    return _extension.functions[_NPU_FUNCTION](lambda *_: None, (torch.float32,))


def on_npu(inputs: Inputs, loss: PlainLoss) -> Tensor | None:
    """Compute a loss, which autograd differentiates, or ``None`` inside a mode that torch functions are seen by."""
    input, weight, reduction = inputs.input, inputs.linear_weight, get_enum(loss.reduction)
    value: Tensor | None = _npu_function()(input, weight, inputs.target, loss.ignore_index, reduction)
    return value
