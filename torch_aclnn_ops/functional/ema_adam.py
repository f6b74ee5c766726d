"""Functional API of :class:`FusedEmaAdam`: one step on lists of tensors (aclnnApplyFusedEmaAdam)."""

from numbers import Real

from torch_aclnn_ops._checks import (
    FRACTION,
    NON_NEGATIVE,
    Rule,
    check_bool,
    check_in_place,
    check_number,
    check_scalar,
    describe,
)
from torch_aclnn_ops._tensors import DTYPES, is_dtensor, local
from torch_aclnn_ops.ops.ema_adam import Options, TensorLists, mark_modified
from torch_aclnn_ops.ops.ema_adam.kernels import note_partial_update, update

import torch
from torch import Tensor


@torch.no_grad()
def fused_ema_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    ema_params: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    ema_decay: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    bias_correction: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Perform a single :class:`FusedEmaAdam` step on lists of tensors, in place. All tensors are checked first.

    Never synchronizes with a device: tensor options are read if they are on the CPU, and else applied on the device.

    Args:
        params: Parameters, real floating point of 16, 32 or 64 bits, of any shape, on any device.
        grads: Gradients, dense. All lists except ``steps`` must match the dtype, shape and device of the parameters.
        exp_avgs: Exponential moving averages of the gradients.
        exp_avg_sqs: Exponential moving averages of the squared gradients.
        ema_params: Exponential moving averages of the parameters.
        steps: Step counts before this step, incremented in place; int64, one element, on the device of the parameter.
        lr: Learning rate, a number or a one-element tensor.
        ema_decay: Decay of ``ema_params``, a number or a one-element tensor.
        beta1: Decay of ``exp_avgs``.
        beta2: Decay of ``exp_avg_sqs``.
        eps: Term added to the denominator.
        weight_decay: Weight decay coefficient.
        decoupled_weight_decay: Apply decoupled weight decay (AdamW) instead of L2 regularization (Adam).
        bias_correction: Divide the moments by ``1 - beta**step``.
        maximize: Maximize the objective instead of minimizing it.
        grad_scale: One-element tensor by which the gradients are divided in place.
        found_inf: One-element tensor; if it is nonzero, the step is skipped and the step counts are unchanged.

    Raises:
        RuntimeError: A tensor that is written to shares memory with another one.
        TypeError: An argument has the wrong type.
        ValueError: An option is out of range, or lists or tensors do not match.

    Example:
        >>> weight, average = torch.ones(1), torch.ones(1)
        >>> lists = [weight], [torch.ones(1)], [torch.zeros(1)], [torch.zeros(1)], [average], [torch.tensor(0)]
        >>> adam = dict(lr=0.1, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.0, decoupled_weight_decay=True)
        >>> fused_ema_adam(*lists, **adam, ema_decay=0.5, bias_correction=True, maximize=False)
        >>> weight, average
        (tensor([0.9000]), tensor([0.9500]))

    Source:
        The CANN operator aclnnApplyFusedEmaAdam.
    """
    adam = (lr, ema_decay, beta1, beta2, eps, weight_decay, decoupled_weight_decay, bias_correction, maximize)
    options = Options(*adam, grad_scale, found_inf)
    check_options(options)
    tensors = TensorLists(params, grads, exp_avgs, exp_avg_sqs, ema_params, steps, [])
    _check_tensors(tensors)
    tensors = tensors.local()
    if not torch.compiler.is_compiling():
        _check_memory(tensors, grad_scale is not None)
        mark_modified(params)
    try:
        update(tensors, options)
    except BaseException as error:
        if not torch.compiler.is_compiling():
            note_partial_update(error)
        raise


_BETA: Rule = (Real, "a number", "at least 0 and below 1", lambda number: 0 <= number < 1)
_NUMBERS = {"beta1": _BETA, "beta2": _BETA, "eps": NON_NEGATIVE, "weight_decay": NON_NEGATIVE}


def check_options(options: Options) -> None:
    """Check types and ranges of the options, without reading values from a device."""
    check_scalar("FusedEmaAdam", "lr", options.lr, NON_NEGATIVE)
    check_scalar("FusedEmaAdam", "ema_decay", options.ema_decay, FRACTION)
    for name, rule in _NUMBERS.items():
        check_number("FusedEmaAdam", name, getattr(options, name), rule)
    for name in ("decoupled_weight_decay", "bias_correction", "maximize"):
        check_bool("FusedEmaAdam", name, getattr(options, name))
    for name in ("grad_scale", "found_inf"):
        value = getattr(options, name)
        if value is not None and not (isinstance(value, Tensor) and value.numel() == 1):
            raise TypeError(f"FusedEmaAdam: {name} must be a tensor with one element or None, but it is {value!r}")


def _check_tensors(tensors: TensorLists) -> None:
    """Check that all lists have the same length, and that the tensors of each parameter match."""
    params = tensors.params
    for name, listed in zip(tensors._fields[:6], tensors, strict=False):
        if isinstance(listed, Tensor) or not hasattr(listed, "__getitem__"):
            raise TypeError(f"fused_ema_adam: {name} must be a list of tensors, but it is {describe(listed)}")
        if len(listed) != len(params):
            raise ValueError(f"fused_ema_adam: {name} has {len(listed)} tensors, but params has {len(params)}")
        for i, tensor in enumerate(listed):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"fused_ema_adam: {name}[{i}] must be a Tensor, but it is {describe(tensor)}")
    for i, (step, param) in enumerate(zip(tensors.steps, params, strict=True)):
        if step.dtype != torch.int64 or step.numel() != 1 or step.device != param.device:
            raise ValueError(
                f"fused_ema_adam: steps[{i}] must be a torch.int64 tensor with one element on {param.device}, like its"
                f" parameter, but it is {step.dtype} {list(step.shape)} on {step.device}"
            )
    for i, tensors_of_param in enumerate(zip(*tensors[:5], strict=True)):
        for name, tensor in zip(tensors._fields, tensors_of_param, strict=False):
            reason = mismatch(tensor, params[i])
            if reason is None and local(tensor).shape != local(params[i]).shape:
                shards = list(local(params[i]).shape), list(local(tensor).shape)
                reason = "must have the shard {} on this rank, as its parameter has, but it has {}".format(*shards)
            if reason:
                raise ValueError(f"fused_ema_adam: {name}[{i}] {reason}")


def _check_memory(tensors: TensorLists, writes_grads: bool) -> None:
    """Check that no tensor that is written to shares memory with another one; the gradients are, to unscale them."""
    lists = zip(tensors._fields[:6], tensors, strict=False)
    named = {f"{name}[{i}]": tensor for name, listed in lists for i, tensor in enumerate(listed)}
    read = {} if writes_grads else {name: tensor for name, tensor in named.items() if name.startswith("grads")}
    check_in_place("fused_ema_adam", {name: one for name, one in named.items() if name not in read}, **read)


def mismatch(tensor: Tensor, param: Tensor) -> str | None:
    """Return why a tensor cannot be the gradient or a state of a parameter, or ``None``."""
    kinds = ["DTensor" if is_dtensor(each) else "plain tensor" for each in (param, tensor)]
    if kinds[0] != kinds[1]:
        return f"must be a {kinds[0]}, as its parameter is, but it is a {kinds[1]}"
    if tensor.layout != torch.strided:
        return f"must be dense, but it is {tensor.layout}"
    if tensor.dtype not in DTYPES:
        return f"must have a real dtype of 16, 32 or 64 bits, but it has {tensor.dtype}"
    if tensor.dtype != param.dtype or tensor.shape != param.shape or tensor.device != param.device:
        return (
            f"must be {param.dtype} {list(param.shape)} on {param.device}, as its parameter is,"
            f" but it is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    return None
