"""``apply_fused_ema_adam_``: one step of Adam with an EMA of the weights (aclnnApplyFusedEmaAdam); a step on lists."""

import math
from collections.abc import Iterable
from itertools import compress
from typing import Any, NamedTuple

from torch_aclnn_ops import _extension
from torch_aclnn_ops._autograd.raw_operator import NAMESPACE, RawOperator
from torch_aclnn_ops._call_log import Implementation, is_logging, log_call
from torch_aclnn_ops._checks import (
    check_dtype,
    check_floating_point,
    check_in_place,
    check_shape,
    values_are_readable,
    why_not_dtype,
)
from torch_aclnn_ops._switch import why_disabled
from torch_aclnn_ops._tensors import accumulation_dtype, local
from torch_aclnn_ops._torch_compat.private import in_dispatch_mode

import torch
from torch import Tensor

_NAME = "apply_fused_ema_adam_"
_L2, _DECOUPLED = 0, 1


def _check(grad: Tensor, var: Tensor, m: Tensor, v: Tensor, s: Tensor, step: Tensor, *options: Any) -> None:
    *_, weight_decay_mode, _bias_correction, _weight_decay = options
    state = {"var": var, "m": m, "v": v, "s": s}
    check_floating_point(_NAME, grad=grad)
    check_dtype(_NAME, [grad.dtype], "as grad has", **state)
    check_dtype(_NAME, [torch.int64], "", step=step)
    check_shape(_NAME, grad.shape, "grad.shape", **state)
    if step.numel() == 0:
        raise ValueError(f"{_NAME}: step must have at least 1 element, but its shape is {list(step.shape)}")
    if weight_decay_mode not in (_L2, _DECOUPLED):
        raise ValueError(f"{_NAME}: weight_decay_mode must be 0 (L2) or 1 (decoupled), but it is {weight_decay_mode}")
    check_in_place(_NAME, state, grad=grad, step=step)


def _check_values(_grad: Tensor, _var: Tensor, _m: Tensor, _v: Tensor, _s: Tensor, step: Tensor, *options: Any) -> None:
    *_, bias_correction, _weight_decay = options
    # The bias correction of step 0 divides by zero. On a device the check would synchronize with the stream.
    if bias_correction and values_are_readable(step) and int(step.flatten()[0]) < 1:
        raise ValueError(
            f"{_NAME}: step must be at least 1 with bias_correction (increment it before the call),"
            f" but it is {int(step.flatten()[0])}"
        )


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """Return ``1 - beta**count`` without cancellation, which loses 4 digits in float32 at ``beta=0.999, count=1``.

    In float64 on an NPU, where it loses 4 of 16 digits, there is no ``expm1``.
    """
    if beta == 0:
        return 1 - beta**count
    exponent = count * math.log(beta)
    return 1 - exponent.exp() if is_float64_on_npu(count) else -torch.expm1(exponent)


def is_float64_on_npu(tensor: Tensor) -> bool:
    """Return whether a tensor is float64 on an NPU, where CANN supports neither ``expm1`` nor ``lerp``."""
    return tensor.dtype == torch.float64 and tensor.device.type == "npu"


def lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """Compute ``torch.lerp``, also in float64 on an NPU."""
    if not is_float64_on_npu(start):
        return torch.lerp(start, end, weight)
    # From the nearer end, so that the result is exact at both ends.
    difference = end - start
    near_start, near_end = start + weight * difference, end - (1 - weight) * difference
    if isinstance(weight, Tensor):
        return near_start.where(weight < 0.5, near_end)
    return near_start if weight < 0.5 else near_end


def lerp_average(average: Tensor, weight: Tensor, share: Any) -> Tensor:
    """Return ``(1 - share) * average + share * weight``, where ``share`` is a number or a one-element tensor.

    The rounded factors do not sum to 1: in float32 the average of a constant weight w would drift to 0.9998 w for a
    share of 1e-4. Therefore this uses ``lerp``, unless the average is infinite.
    """
    weighted_sum = (1 - share) * average + share * weight
    return torch.where(average.isinf(), weighted_sum, lerp(average, weight, share))


def formula(
    grad: Tensor,
    var: Tensor,
    m: Tensor,
    v: Tensor,
    s: Tensor,
    step: Tensor,
    lr: float,
    ema_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay_mode: int,
    bias_correction: bool,
    weight_decay: float,
) -> None:
    """Update ``var``, ``m``, ``v`` and ``s`` in place; ``step`` already includes this step.

    16-bit state is rounded only when it is stored; the step itself uses the unrounded values.
    """
    wide = accumulation_dtype(grad.dtype)
    gradient, weight, first, second, average = (tensor.to(wide) for tensor in (grad, var, m, v, s))
    # Not step.to(wide), because torch_npu casts to float32 instead of float64.
    count = step.flatten()[0] * torch.ones((), dtype=wide, device=step.device)
    correction1 = _bias_correction(beta1, count) if bias_correction else 1.0
    correction2 = _bias_correction(beta2, count) if bias_correction else 1.0
    if weight_decay_mode == _L2:
        gradient = gradient + weight_decay * weight
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient.square()
    update = (first / correction1) / ((second / correction2).sqrt() + eps)
    if weight_decay_mode == _DECOUPLED:
        update = update + weight_decay * weight
    weight = weight - lr * update
    average = lerp_average(average, weight, 1 - ema_decay)
    for state, value in ((var, weight), (m, first), (v, second), (s, average)):
        state.copy_(value)


def _limits(soc: str, grad: Tensor, *_: object) -> str | None:
    return why_not_dtype(soc, ("grad",), grad)


def _fake(*_: object) -> None:
    return None


# CANN's argument mode is renamed to weight_decay_mode: torch.compile cannot functionalize an operator with a keyword
# argument named mode, because torch._higher_order_ops.utils.redirect_to_mode has one too.
apply_fused_ema_adam_ = RawOperator(
    "apply_fused_ema_adam_(Tensor grad, Tensor(a!) var, Tensor(b!) m, Tensor(c!) v, Tensor(d!) s, Tensor step, *,"
    " float lr, float ema_decay, float beta1, float beta2, float eps, int weight_decay_mode,"
    " bool bias_correction, float weight_decay) -> ()",
    cann="aclnnApplyFusedEmaAdam",
    limits=_limits,
    chips=("Ascend910B", "Ascend910_93", "Ascend950"),
    check=_check,
    check_values=_check_values,
    formula=formula,
    fake=_fake,
)


def run(*args: Any) -> None:
    """Call the operator, falling back to PyTorch on a chip without it, and while the package is disabled."""
    reason = why_disabled() if args[0].device.type == "npu" else None
    if reason is None:
        apply_fused_ema_adam_.run(*args)
    else:
        apply_fused_ema_adam_.fall_back(reason, *args)


def why_not_cann(*args: Any) -> str | None:
    """Return why :func:`run` falls back to PyTorch for these NPU arguments, or ``None`` if it does not."""
    return why_disabled() or apply_fused_ema_adam_.why_not_cann(*args)


def takes_lists(grads: Iterable[Tensor]) -> bool:
    """Return whether :func:`run_lists` takes the parameters with these gradients, which are on one NPU."""
    if in_dispatch_mode() or _extension.checks_values():  # both inspect every call
        return False
    kinds = {(grad.dtype, grad.dim()): grad for grad in grads}
    return all(why_not_cann(grad) is None for grad in kinds.values())


def run_lists(tensors: list[list[Tensor]], *options: Any) -> None:
    """Increment the step counts of parameters on one NPU, and call the operator for each of them.

    What CANN refuses raises before anything is written.

    Args:
        tensors: The operator's tensors, as six lists.
        *options: The operator's options.
    """
    if is_logging():
        log_call(apply_fused_ema_adam_.name, Implementation.CANN, lambda: apply_fused_ema_adam_.cann, len(tensors[0]))
    _extension.entries["apply_fused_ema_adam_list"](*tensors, *options)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "apply_fused_ema_adam_with_tensor_lr_(Tensor grad, Tensor(a!) var, Tensor(b!) m, Tensor(c!) v, Tensor(d!) s,"
    " Tensor step, Tensor lr, float ema_decay, float beta1, float beta2, float eps, int weight_decay_mode,"
    " bool bias_correction, float weight_decay) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
apply_with_tensor_lr_ = torch.ops.torch_aclnn_ops.apply_fused_ema_adam_with_tensor_lr_.default
"""The operator with the learning rate as a CPU tensor, so that a new value does not trigger recompilation."""


def _apply_with_tensor_lr(*args: Any) -> None:
    tensors, lr, options = args[:6], args[6], args[7:]
    run(*tensors, lr.item(), *options)


_library.impl("apply_fused_ema_adam_with_tensor_lr_", _apply_with_tensor_lr, "CompositeExplicitAutograd")
torch.library.register_fake(apply_with_tensor_lr_, _fake, lib=_library)


class Options(NamedTuple):
    """The options of a step; see :class:`torch_aclnn_ops.optim.FusedEmaAdam`."""

    lr: float | Tensor
    ema_decay: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    bias_correction: bool
    maximize: bool
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


class TensorLists(NamedTuple):
    """The tensors of a step, as lists with one entry per parameter.

    If ``params`` are master weights, ``rounded`` are the parameters that they are copied to; otherwise it is empty. For
    parameters without a gradient, only ``params``, ``ema_params`` and ``steps`` have entries.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    ema_params: list[Tensor]
    steps: list[Tensor]
    rounded: list[Tensor]

    def select(self, selectors: list[bool]) -> "TensorLists":
        """Return the parameters whose selector is true."""
        return TensorLists(*(list(compress(tensors, selectors)) for tensors in self))

    def part(self, part: slice) -> "TensorLists":
        """Return a slice of the parameters."""
        return TensorLists(*(tensors[part] for tensors in self))

    def local(self) -> "TensorLists":
        """Return the local shards of all DTensors; the step is element-wise."""
        return TensorLists(*([local(tensor) for tensor in tensors] for tensors in self))


def empty_lists() -> TensorLists:
    """Return lists of no parameters."""
    return TensorLists([], [], [], [], [], [], [])


def mark_modified(params: Iterable[Tensor]) -> None:
    """Tell autograd that parameters change, so that a backward pass through their old values raises.

    torch's fused kernels for CPUs do not, nor does a write to the shard of a ``DTensor``.
    """
    params = list(params)
    if any(map(Tensor.is_inference, params)):
        params = [param for param in params if not param.is_inference()]
    torch.autograd.graph.increment_version(params)
