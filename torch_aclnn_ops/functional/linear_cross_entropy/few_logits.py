"""The loss of few logits: ``cross_entropy(linear(...))``, with float32 logits also for 16-bit inputs."""

from typing import Any

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops._call_log import is_logging_in_eager_mode
from torch_aclnn_ops._checks import values_are_readable
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._tensors import HALF_DTYPES, widen, without_autocast
from torch_aclnn_ops._torch_compat.private import in_dispatch_mode, is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import check_no_tangent
from torch_aclnn_ops.functional._head.arguments import flat, rounded_by_autocast
from torch_aclnn_ops.functional.linear_cross_entropy.arguments import REDUCTIONS, to_loss_dtype
from torch_aclnn_ops.functional.linear_cross_entropy.losses import check_targets, have_classes
from torch_aclnn_ops.ops import _tiling as tiling
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import log_few_logits

import torch
from torch import Tensor

# The logits, their logarithms of probabilities and their gradient.
_FLOATS_OF_LOGIT = 3


def loss_in_cpp(call: Call) -> Tensor | None:
    """Return the loss of few float32 logits on the CPU if C++ finds nothing unusual in the arguments, else ``None``.

    It computes the same as :func:`loss_of_few_logits`, with a tenth of its overhead over torch's functions. Only for
    calls with the default options of this package.
    """
    if torch.compiler.is_compiling() or is_logging_in_eager_mode() or is_disabled():
        return None
    if call.weight is not None or call.token_weight is not None:
        return None
    if type(call.reduction) is not str or call.reduction not in REDUCTIONS:
        return None
    reduction = REDUCTIONS.index(call.reduction)  # its number in at::Reduction
    ignore_index = -100 if call.ignore_index is None else call.ignore_index
    tensors = (call.input, call.linear_weight, call.linear_bias, call.target)
    most_logits = tiling.LOGITS_BYTES // (4 * _FLOATS_OF_LOGIT)
    return _cpu_extension.few_logits(*tensors, reduction, ignore_index, call.label_smoothing, most_logits)


def are_few(call: Call) -> bool:
    """Return whether torch computes the same loss, and the logits and all that autograd saves with them are small."""
    weight, target = call.linear_weight, call.target
    if target.is_floating_point() or weight.dim() > 2 or torch.compiler.is_compiling():
        return False
    if call.outputs or call.token_weight is not None:
        return False
    if call.chunk_size is not None or call.max_memory is not None:
        return False
    if not weight.is_cpu and (weight.dtype in HALF_DTYPES or is_any_autocast_enabled()):  # CANN's operators
        return False
    rows, classes = target.numel(), weight.shape[0]
    number = (_FLOATS_OF_LOGIT + 2 * (call.lse_square_scale != 0)) * rows * classes
    if weight.dtype in HALF_DTYPES:
        number += rows * weight.shape[1] + weight.numel()
    elif weight.dtype is not torch.float32:
        return False
    return rows > 0 and 4 * number <= tiling.LOGITS_BYTES


def loss_of_few_logits(call: Call) -> Tensor:
    """Compute the loss in torch's functions, which materialize all logits and have every derivative.

    Unlike with torch's functions, ignored rows may contain inf and nan.
    """
    log_few_logits(call)
    if is_any_autocast_enabled():  # the logits of rounded numbers can be computed in float32
        call = Call._make((*rounded_by_autocast(*call[:3]), *call[3:]))
    input, target = call.input, call.target
    if call.weight is not None:
        check_no_tangent("linear_cross_entropy", call.weight)
        call = call._replace(weight=to_loss_dtype(input, call.weight))
    if target.dim() != 1 or target.dtype is not torch.int64:
        call = call._replace(input=flat(input), target=target.reshape(-1).long())
    if any([one is not None and one.is_inference() for one in (call.target, call.weight)]):
        call = call._replace(target=_savable(call.target), weight=_savable(call.weight))
    loss = _loss(call)
    return loss if loss.dim() == target.dim() or call.reduction != "none" else loss.reshape(target.shape)


def _savable(tensor: Any) -> Any:
    """Return a tensor that autograd can save: it refuses those of inference mode."""
    return tensor.clone() if tensor is not None and torch.is_grad_enabled() else tensor


@without_autocast
def _loss(call: Call) -> Tensor:
    """Compute the loss of rows."""
    target, classes = call.target, call.linear_weight.shape[0]
    ignore_index = call.ignored_class()
    if not values_are_readable(target) or in_dispatch_mode():
        return _loss_on_device(call, ignore_index)
    if have_classes(target, classes, ignore_index):
        return _cross_entropy(call)
    ignored = target == ignore_index
    check_targets(call, ~ignored & ((target < 0) | (target >= classes)), classes)
    kept = ignored.logical_not().nonzero().squeeze(1)
    loss = _cross_entropy(call._replace(input=call.input[kept], target=target[kept]))
    if call.reduction == "none":
        return loss.new_zeros(target.shape).index_put((kept,), loss)
    if call.reduction == "mean" and call.zero_if_all_ignored:
        return loss.masked_fill(ignored.all(), 0)
    return loss


def _loss_on_device(call: Call, ignore_index: int) -> Tensor:
    """Compute the loss without reading values: nan for a class index out of range."""
    target = call.target
    ignored = target == ignore_index
    in_range = target.where(ignored, target.clamp(0, call.linear_weight.shape[0] - 1))
    # A row whose class is out of range is nan, as its gradient: 0 / 0. Not inf, which a softcap makes finite.
    input = widen(call.input)
    offset = (ignored / (in_range == target)).to(input.dtype).unsqueeze(1)  # 1 for ignored rows
    input = torch.where(ignored.unsqueeze(1), offset, input + offset)
    loss = _cross_entropy(call._replace(input=input, target=in_range), ignored)
    if call.reduction == "mean" and call.zero_if_all_ignored:
        return loss.masked_fill(ignored.all(), 0)
    return loss


def _cross_entropy(call: Call, ignored: Tensor | None = None) -> Tensor:
    """Compute the loss of rows that have a class, except those that are ignored."""
    input, linear_weight, linear_bias, target, weight, *_ = call
    if linear_weight.dtype is not torch.float32:
        input, linear_weight = widen(input), widen(linear_weight)
        linear_bias = None if linear_bias is None else widen(linear_bias)
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    softcap = call.finite_softcap(torch.float32)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * (softcap / call.temperature)
    elif call.temperature != 1:
        logits = logits / call.temperature
    loss = torch.nn.functional.cross_entropy(
        logits,
        target,
        weight,
        reduction=call.reduction,
        ignore_index=call.ignored_class(),
        label_smoothing=float(call.label_smoothing),
    )
    if call.lse_square_scale == 0:
        return loss
    z_loss = call.lse_square_scale * logits.logsumexp(1).square()
    if ignored is not None:
        z_loss = z_loss.masked_fill(ignored, 0)
    if call.reduction == "mean":
        z_loss = z_loss.mean() if ignored is None else z_loss.sum() / ignored.logical_not().sum()
    return loss + (z_loss.sum() if call.reduction == "sum" else z_loss)
