"""The kernels of a step of FusedEmaAdam, which give the same results, and what they are given.

``single_tensor`` calls the operator once per parameter, on any device and under ``torch.compile``; ``multi_tensor``
gives lists to torch's own CPU kernels. Flattened parameters go through the same two, as few and long ones.
"""

from collections.abc import Iterator
from itertools import compress
from typing import NamedTuple

from torch_aclnn_ops._torch_compat import foreach_add_, foreach_lerp_, fused_adam_, fused_adamw_
from torch_aclnn_ops.ops import apply_fused_ema_adam_

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Options", "TensorLists", "batches", "has_native_kernel", "is_dense", "is_plain", "local", "update"]

# Elements that torch's kernels take at a time: the average then finds the new weights in the cache. A multiple of a
# cache line, so that no element changes between the kernel's vector and scalar code, which round differently.
_CACHED_ELEMENTS = 2**20


class Options(NamedTuple):
    """The options of a step, in the names of :class:`torch_aclnn_ops.optim.FusedEmaAdam`."""

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
    """The tensors of a step; those at one place of the lists belong to one parameter."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    ema_params: list[Tensor]
    steps: list[Tensor]

    def select(self, selectors: list[bool]) -> "TensorLists":
        """Return the parameters whose selector is true."""
        return TensorLists(*(list(compress(tensors, selectors)) for tensors in self))

    def part(self, part: slice) -> "TensorLists":
        """Return the parameters of a slice."""
        return TensorLists(*(tensors[part] for tensors in self))

    def local(self) -> "TensorLists":
        """Return this process's shards of tensors that are spread over several: the step is element-wise."""
        return TensorLists(*([local(tensor) for tensor in tensors] for tensors in self))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is of no subclass but ``Parameter``."""
    return type(tensor) in (Tensor, Parameter)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a ``DTensor``, or the tensor itself."""
    if is_plain(tensor) or not hasattr(tensor, "to_local"):
        return tensor
    shard: Tensor = tensor.to_local()
    return shard


def batches(params: list[Tensor], limit: int) -> Iterator[slice]:
    """Cut a list where the parameters so far have ``limit`` elements; a longer parameter is alone."""
    start = elements = 0
    for i, param in enumerate(params):
        size = param.numel()
        if i > start and elements + size > limit:
            yield slice(start, i)
            start, elements = i, 0
        elements += size
    yield slice(start, len(params))


def update(tensors: TensorLists, options: Options) -> None:
    """Increment the steps, and update the parameters and their states; the tensors must fit each other.

    Of a step with several elements all are incremented and the first one counts.
    """
    if torch.compiler.is_compiling():  # where only the operator can be traced, and no value can be read
        single_tensor(tensors, options)
        return
    lr, ema_decay, found_inf = _read(options.lr), _read(options.ema_decay), options.found_inf
    if found_inf is not None and found_inf.is_cpu:
        if found_inf.item():
            return
        found_inf = None
    if lr is not options.lr or ema_decay is not options.ema_decay or found_inf is not options.found_inf:
        options = options._replace(lr=lr, ema_decay=ema_decay, found_inf=found_inf)
    if isinstance(lr, Tensor) or isinstance(ema_decay, Tensor) or found_inf is not None:
        single_tensor(tensors, options)
        return
    params, _, exp_avgs, exp_avg_sqs, ema_params, _ = tensors
    is_native = list(map(has_native_kernel, params, exp_avgs, exp_avg_sqs, ema_params))
    if all(is_native):
        multi_tensor(tensors, options)
    else:
        multi_tensor(tensors.select(is_native), options)
        single_tensor(tensors.select([not native for native in is_native]), options)


def _read(option: float | Tensor) -> float | Tensor:
    """Read a tensor where that waits for no device."""
    return option.item() if isinstance(option, Tensor) and option.is_cpu else option


def single_tensor(tensors: TensorLists, options: Options) -> None:
    """Do a step by one call of the operator per parameter."""
    for one in zip(*tensors, strict=True):
        _update_one(options, *one)


def _update_one(
    options: Options,
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ema_param: Tensor,
    step: Tensor,
) -> None:
    lr, ema_decay, found_inf = options.lr, options.ema_decay, options.found_inf
    if options.grad_scale is not None:
        grad.div_(options.grad_scale.to(grad.device))
    states = (param, exp_avg, exp_avg_sq, ema_param)
    saved = [] if found_inf is None else [state.clone() for state in states]
    old_param = param.clone() if isinstance(lr, Tensor) else param
    # The operator takes numbers. With 1 in the place of a tensor it leaves out what is done below.
    is_on_device = isinstance(lr, Tensor) or isinstance(ema_decay, Tensor)
    step.add_(1)
    # A direct call on an NPU is CANN's operator alone; this one falls back on its formula on a chip without it.
    call = apply_fused_ema_adam_.run if param.device.type == "npu" else apply_fused_ema_adam_
    call(
        -grad if options.maximize else grad,
        *states,
        step,
        1.0 if isinstance(lr, Tensor) else lr,
        1.0 if is_on_device else ema_decay,
        options.beta1,
        options.beta2,
        options.eps,
        int(options.decoupled_weight_decay),
        options.bias_correction,
        options.weight_decay,
    )
    if isinstance(lr, Tensor):
        param.copy_(old_param.lerp_(param, lr.reshape(()).to(param)))
    if is_on_device:
        weight = 1 - ema_decay
        ema_param.lerp_(param, weight.reshape(()).to(ema_param) if isinstance(weight, Tensor) else weight)
    if found_inf is not None:
        is_skipped = found_inf.reshape(()).to(param.device) != 0
        for state, old in zip(states, saved, strict=True):
            state.copy_(torch.where(is_skipped, old, state))
        step.sub_(is_skipped.to(step.dtype))


def multi_tensor(tensors: TensorLists, options: Options) -> None:
    """Do a step by torch's kernels for lists; for tensors that have one, see ``has_native_kernel``."""
    if tensors.params:
        tensors = tensors._replace(grads=list(map(_laid_out_as, tensors.params, tensors.grads)))
        for part in batches(tensors.params, _CACHED_ELEMENTS):
            _update_batch(tensors.part(part), options)


def _update_batch(batch: TensorLists, options: Options) -> None:
    foreach_add_(batch.steps, 1)
    if options.bias_correction:
        steps = [step if step.dim() == 0 else step.view(-1)[0] for step in batch.steps]
    else:
        # The kernel always divides by 1 - beta**step, which is 1 for every beta after this many steps.
        steps = [torch.tensor(2**62, device="cpu")] * len(batch.steps)
    native_adam = fused_adamw_ if options.decoupled_weight_decay else fused_adam_
    for params, grads, exp_avgs, exp_avg_sqs, ema_params in _pieces(batch):
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
            grad_scale=options.grad_scale,
        )
        if options.ema_decay != 1:
            foreach_lerp_(ema_params, params, float(1 - options.ema_decay))


def _pieces(batch: TensorLists) -> list[list[list[Tensor]]]:
    """Cut a parameter that is longer than a batch; return the lists without steps."""
    *lists, _ = batch
    if len(batch.params) > 1 or batch.params[0].numel() <= _CACHED_ELEMENTS or not batch.params[0].is_contiguous():
        return [lists]
    cut = (tensors[0].view(-1).split(_CACHED_ELEMENTS) for tensors in lists)
    return [[[tensor] for tensor in piece] for piece in zip(*cut, strict=True)]


def has_native_kernel(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ema_param: Tensor) -> bool:
    """Return whether torch's own CPU kernels compute the operator for a parameter.

    They round 16-bit state in other places, and go through all tensors in the order of memory, whatever the strides.
    """
    if not param.is_cpu or param.dtype not in (torch.float32, torch.float64):
        return False
    if param.is_contiguous():
        return exp_avg.is_contiguous() and exp_avg_sq.is_contiguous() and ema_param.is_contiguous()
    strides = param.stride()
    return is_dense(param) and exp_avg.stride() == exp_avg_sq.stride() == ema_param.stride() == strides


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps and overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _laid_out_as(param: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in its parameter's order of memory."""
    if (param.is_contiguous() and grad.is_contiguous()) or grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)
