"""One step of Adam, and of an average of the weights, on lists of tensors (aclnnApplyFusedEmaAdam)."""

import math
from collections.abc import Callable
from itertools import compress
from numbers import Real
from typing import NamedTuple

from torch_aclnn_ops.ops import apply_fused_ema_adam_

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
    lr: float,
    ema_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    bias_correction: bool,
    maximize: bool,
) -> None:
    """Do one step of :class:`FusedEmaAdam` on lists of tensors, in place, after a look at all of them.

    Args:
        params: the weights, real floating-point, of any shape, on any device.
        grads: the gradients; dense, and like all but ``steps`` of the same dtype, shape and device as the weights.
        exp_avgs: the averages of the gradients.
        exp_avg_sqs: the averages of the squared gradients.
        ema_params: the averages of the weights.
        steps: the number of steps before this one, incremented here; int64, one element, on the device of the weights.
        lr: the learning rate.
        ema_decay: how much of ``ema_params`` is kept.
        beta1: how much of ``exp_avgs`` is kept.
        beta2: how much of ``exp_avg_sqs`` is kept.
        eps: is added to the denominator.
        weight_decay: the weight decay.
        decoupled_weight_decay: subtract the decay from the weights, do not add it to the gradient.
        bias_correction: divide the moments by ``1 - beta**step``.
        maximize: go up the gradient instead of down.

    Raises:
        TypeError: an option is not a number, or not a bool where one is wanted.
        ValueError: an option is out of range, or lists or tensors do not fit each other.

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
    options = Options(lr, ema_decay, beta1, beta2, eps, weight_decay, decoupled_weight_decay, bias_correction, maximize)
    tensors = TensorLists(params, grads, exp_avgs, exp_avg_sqs, ema_params, steps)
    options.check()
    tensors.check()
    _update(tensors, options)


# What each number may be, as a test and in words.
_AT_LEAST_0: tuple[Callable[[float], bool], str] = (lambda value: 0 <= value < math.inf, "finite and at least 0")
_FROM_0_BELOW_1: tuple[Callable[[float], bool], str] = (lambda value: 0 <= value < 1, "in [0, 1)")
_FROM_0_TO_1: tuple[Callable[[float], bool], str] = (lambda value: 0 <= value <= 1, "in [0, 1]")
_RANGES = {
    "lr": _AT_LEAST_0,
    "ema_decay": _FROM_0_TO_1,
    "beta1": _FROM_0_BELOW_1,
    "beta2": _FROM_0_BELOW_1,
    "eps": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
}


class Options(NamedTuple):
    """The options of a step, in the names of :class:`torch_aclnn_ops.optim.FusedEmaAdam`."""

    lr: float
    ema_decay: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    bias_correction: bool
    maximize: bool

    def check(self) -> None:
        """Raise where an option has another type, or is out of its range."""
        for name, value in self._asdict().items():
            if name not in _RANGES:
                if not isinstance(value, bool):
                    raise TypeError(f"FusedEmaAdam: {name} must be True or False, but it is {value!r}")
            elif not isinstance(value, Real):
                raise TypeError(f"FusedEmaAdam: {name} must be a number, but it is {value!r}")
            elif not _RANGES[name][0](float(value)):
                raise ValueError(f"FusedEmaAdam: {name} must be {_RANGES[name][1]}, but it is {value}")


class TensorLists(NamedTuple):
    """The tensors of a step; those at one place of the lists belong to one parameter."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    ema_params: list[Tensor]
    steps: list[Tensor]

    def check(self) -> None:
        """Raise where the lists, or the tensors of one parameter, do not fit each other."""
        params = self.params
        for name, tensors in self._asdict().items():
            if len(tensors) != len(params):
                raise ValueError(f"fused_ema_adam: {name} has {len(tensors)} tensors, but params has {len(params)}")
        for i, (step, param) in enumerate(zip(self.steps, params, strict=True)):
            if step.dtype != torch.int64 or step.numel() != 1 or step.device != param.device:
                raise ValueError(
                    f"fused_ema_adam: steps[{i}] must be one torch.int64 on {param.device}, as its parameter is,"
                    f" but it is {step.dtype} {list(step.shape)} on {step.device}"
                )
        for i, of_parameter in enumerate(zip(*self[:-1], strict=True)):
            if not _are_alike(*of_parameter):
                for name, tensor in zip(self._fields, of_parameter, strict=False):
                    reason = why_unlike(tensor, params[i])
                    if reason:
                        raise ValueError(f"fused_ema_adam: {name}[{i}] {reason}")

    def select(self, selectors: list[bool]) -> "TensorLists":
        """Return the parameters whose selector is true."""
        return TensorLists(*(list(compress(tensors, selectors)) for tensors in self))


def _are_alike(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ema_param: Tensor) -> bool:
    """Return whether ``why_unlike`` has nothing to say: quickly, as there may be thousands of parameters a step."""
    return (
        param.is_floating_point()
        and grad.layout == torch.strided
        and param.dtype == grad.dtype == exp_avg.dtype == exp_avg_sq.dtype == ema_param.dtype
        and param.shape == grad.shape == exp_avg.shape == exp_avg_sq.shape == ema_param.shape
        and param.device == grad.device == exp_avg.device == exp_avg_sq.device == ema_param.device
    )


def why_unlike(tensor: Tensor, param: Tensor) -> str | None:
    """Say why a tensor cannot be the gradient or a state of a parameter."""
    if tensor.layout != torch.strided:
        return f"must be dense, but it is {tensor.layout}"
    if not tensor.is_floating_point():
        return f"must have a real floating-point dtype, but it has {tensor.dtype}"
    if tensor.dtype != param.dtype or tensor.shape != param.shape or tensor.device != param.device:
        return (
            f"must be {param.dtype} {list(param.shape)} on {param.device}, as its parameter is,"
            f" but it is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    return None


def _update(tensors: TensorLists, options: Options) -> None:
    """Increment the steps, and update the parameters and their states; the tensors must fit each other."""
    is_compiling = torch.compiler.is_compiling()  # where only the operator can be traced
    native = [not is_compiling and _has_native_kernel(*one) for one in zip(*tensors[:-1], strict=True)]
    _multi_tensor(tensors.select(native), options)
    _single_tensor(tensors.select([not is_native for is_native in native]), options)


def _single_tensor(tensors: TensorLists, options: Options) -> None:
    for param, grad, exp_avg, exp_avg_sq, ema_param, step in zip(*tensors, strict=True):
        step.add_(1)
        apply_fused_ema_adam_(
            -grad if options.maximize else grad,
            param,
            exp_avg,
            exp_avg_sq,
            ema_param,
            step,
            lr=options.lr,
            ema_decay=options.ema_decay,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay_mode=int(options.decoupled_weight_decay),
            bias_correction=options.bias_correction,
            weight_decay=options.weight_decay,
        )


def _multi_tensor(tensors: TensorLists, options: Options) -> None:
    params, grads, exp_avgs, exp_avg_sqs, ema_params, steps = tensors
    if not params:
        return
    torch._foreach_add_(steps, 1)
    if not options.bias_correction:
        # The kernel always divides by 1 - beta**step, which is 1 for every beta after this many steps.
        steps = [torch.tensor(2**62, device="cpu")] * len(params)
    native_adam = torch._fused_adamw_ if options.decoupled_weight_decay else torch._fused_adam_
    native_adam(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
    )
    torch._foreach_lerp_(ema_params, params, 1 - options.ema_decay)


def _has_native_kernel(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ema_param: Tensor) -> bool:
    """Return whether torch's own CPU kernels compute the operator for a parameter.

    They round 16-bit state in other places, and go through all tensors in the order of memory, whatever the strides.
    """
    if not param.is_cpu or param.dtype not in (torch.float32, torch.float64):
        return False
    if param.is_contiguous():
        return (
            grad.is_contiguous()
            and exp_avg.is_contiguous()
            and exp_avg_sq.is_contiguous()
            and ema_param.is_contiguous()
        )
    tensors = (param, grad, exp_avg, exp_avg_sq, ema_param)
    return all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)
