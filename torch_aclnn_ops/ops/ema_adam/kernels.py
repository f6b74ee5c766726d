"""The implementations of a FusedEmaAdam step, which compute the same results.

``single_tensor`` calls the operator once per parameter, on any device and under ``torch.compile``; ``on_npu`` calls it
for a list of parameters on an NPU. ``multi_tensor`` calls PyTorch's fused CPU kernels on lists, whose ``lerp`` turns an
infinite average into nan, as in ``swa_utils``. Flattened parameters use the same three, as a few long tensors.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from torch_aclnn_ops._call_log import Implementation, is_logging, log_call
from torch_aclnn_ops._tensors import is_dense
from torch_aclnn_ops._torch_compat.private import (
    foreach_add_,
    foreach_copy_,
    foreach_lerp_,
    foreach_neg,
    fused_adam_,
    fused_adamw_,
)
from torch_aclnn_ops.ops import apply_fused_ema_adam_
from torch_aclnn_ops.ops.ema_adam import (
    Options,
    TensorLists,
    apply_with_tensor_lr_,
    lerp,
    lerp_average,
    run,
    run_lists,
    takes_lists,
    why_not_cann,
)

import torch
from torch import Tensor

# Elements per call of PyTorch's kernels, so that the averaging finds the new weights in the cache. A multiple of a
# cache line, so that no element moves between vectorized and scalar code, which round differently.
_CACHED_ELEMENTS = 2**20
_is_cpu: Callable[[Tensor], bool] = attrgetter("is_cpu")
_dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_NATIVE_DTYPES = (torch.float32, torch.float64)


def update(tensors: TensorLists, options: Options) -> None:
    """Increment the step counts, and update the parameters and their states in place; the tensors must match.

    If a step count has several elements, all are incremented and the first one is used.
    """
    if torch.compiler.is_compiling():  # only the operator can be traced, and no value can be read
        if not isinstance(options.lr, Tensor):  # a number would be a constant, and trigger recompilation
            options = options._replace(lr=torch.ones((), dtype=torch.float64, device="cpu") * options.lr)
        single_tensor(tensors, options)
        return
    if is_logging():  # on an NPU the operator logs it
        lists = zip(tensors.params, *tensors[2:5], strict=True)
        chosen = Counter(implementation_for(*one) for one in lists if one[0].device.type != "npu")
        for (implementation, reason), calls in chosen.items():
            log_call(apply_fused_ema_adam_.name, implementation, partial(str, reason), calls)
    lr, ema_decay, found_inf = _read_if_on_cpu(options.lr), _read_if_on_cpu(options.ema_decay), options.found_inf
    if found_inf is not None and found_inf.is_cpu:
        if found_inf.item():
            return
        found_inf = None
    if lr is not options.lr or ema_decay is not options.ema_decay or found_inf is not options.found_inf:
        options = options._replace(lr=lr, ema_decay=ema_decay, found_inf=found_inf)
    if isinstance(lr, Tensor) or isinstance(ema_decay, Tensor) or found_inf is not None:
        single_tensor(tensors, options)
        return
    if not tensors.params:
        return
    if _are_native_and_contiguous(tensors):
        _update_in_batches(tensors, options)
        return
    is_native = list(map(has_native_kernel, tensors.params, *tensors[2:5]))
    if all(is_native):
        multi_tensor(tensors, options)
        return
    if any(is_native):
        multi_tensor(tensors.select(is_native), options)
        tensors = tensors.select([not native for native in is_native])
    for others in by_device(tensors):
        if others.grads[0].device.type == "npu" and options.grad_scale is None and takes_lists(others.grads):
            on_npu(others, options)
        else:
            single_tensor(others, options)


def by_device(tensors: TensorLists) -> list[TensorLists]:
    """Split the parameters by their devices."""
    members = defaultdict(list)
    for i, average in enumerate(tensors.ema_params):
        members[average.device].append(i)
    if len(members) == 1:
        return [tensors]
    return [
        TensorLists(*([listed[i] for i in part] if listed else [] for listed in tensors)) for part in members.values()
    ]


def on_npu(tensors: TensorLists, options: Options) -> None:
    """Perform a step of parameters on one NPU with a single call into the extension."""
    grads = foreach_neg(tensors.grads) if options.maximize else tensors.grads
    run_lists([grads, *map(list, (tensors.params, *tensors[2:6]))], *_numbers(options))
    if tensors.rounded:
        foreach_copy_(tensors.rounded, tensors.params)


def _numbers(options: Options) -> tuple[Any, ...]:
    """Return the options of a step in the order of the operator's."""
    lr, ema_decay, beta1, beta2, eps, weight_decay, is_decoupled, bias_correction, *_ = options
    return lr, ema_decay, beta1, beta2, eps, int(is_decoupled), bias_correction, weight_decay


def note_partial_update(error: BaseException) -> None:
    """Note in an exception raised after the first write of a step what to do; before Python 3.11, warn instead."""
    note = "FusedEmaAdam: the step stopped midway, so that parameters may be partly updated; load a checkpoint"
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        warnings.warn(note, stacklevel=3)


def _read_if_on_cpu(option: float | Tensor) -> float | Tensor:
    """Read the value of a CPU tensor; return other options unchanged."""
    return option.item() if isinstance(option, Tensor) and option.is_cpu else option


def single_tensor(tensors: TensorLists, options: Options) -> None:
    """Perform a step with one call of the operator per parameter."""
    for i in range(len(tensors.params)):
        _update_one(tensors.part(slice(i, i + 1)), options)


def _update_one(one: TensorLists, options: Options) -> None:
    (param,), (grad,), (exp_avg,), (exp_avg_sq,), (ema_param,), (step,), rounded = one
    states = (param, exp_avg, exp_avg_sq, ema_param)
    if options.grad_scale is not None:
        grad.copy_(grad / options.grad_scale.to(grad.device))
    applied = options.ema_decay, options.found_inf, None if _operator_supports(options.lr) else options.lr
    if any(isinstance(option, Tensor) for option in applied):
        new_states, new_step = _out_of_place_update(options, states, grad, step)
        for old, new in zip((*states, step), (*new_states, new_step), strict=True):
            old.copy_(new)
    else:
        step.add_(1)
        _apply_operator(options, grad, *states, step)
    for copy in rounded:
        copy.copy_(param)


def _operator_supports(lr: float | Tensor) -> bool:
    """Return whether the operator supports a learning rate: a number, or a CPU tensor in compiled code."""
    return not isinstance(lr, Tensor) or (torch.compiler.is_compiling() and lr.is_cpu)


def _apply_operator(options: Options, grad: Tensor, *states_and_step: Tensor) -> None:
    # On an NPU run() falls back to PyTorch on a chip without the operator, where a direct call raises.
    call = run if grad.device.type == "npu" else apply_fused_ema_adam_
    (apply_with_tensor_lr_ if isinstance(options.lr, Tensor) else call)(
        -grad if options.maximize else grad, *states_and_step, *_numbers(options)
    )


def _out_of_place_update(
    options: Options, states: Sequence[Tensor], grad: Tensor, step: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return the updated states and step count, with tensor options applied on the device."""
    lr, ema_decay, found_inf = options.lr, options.ema_decay, options.found_inf
    new_states, new_step = [state.clone() for state in states], step + 1
    # The operator gets 1 in place of a tensor option, which is applied below.
    is_on_device = not _operator_supports(lr) or isinstance(ema_decay, Tensor)
    supported = options._replace(lr=lr if _operator_supports(lr) else 1.0, ema_decay=1.0 if is_on_device else ema_decay)
    _apply_operator(supported, grad, *new_states, new_step)
    new_param, new_average = new_states[0], new_states[-1]
    if isinstance(lr, Tensor) and not _operator_supports(lr):
        new_param.copy_(lerp(states[0], new_param, lr.reshape(()).to(new_param)))
    if is_on_device:
        share = 1 - ema_decay
        share = share.reshape(()).to(new_average) if isinstance(share, Tensor) else share
        new_states[-1] = lerp_average(new_average, new_param, share)
    if found_inf is not None:
        is_skipped = found_inf.reshape(()).to(step.device) != 0
        new_states = [torch.where(is_skipped, old, new) for old, new in zip(states, new_states, strict=True)]
        new_step = torch.where(is_skipped, step, new_step)
    return new_states, new_step


def multi_tensor(tensors: TensorLists, options: Options) -> None:
    """Perform a step with PyTorch's fused kernels, for tensors that support them; see ``has_native_kernel``."""
    grads = list(map(_match_strides, tensors.params, tensors.grads))
    _update_in_batches(tensors._replace(grads=grads), options)
    if options.grad_scale is not None:  # the gradients are unscaled, not copies alone
        for grad, used in zip(tensors.grads, grads, strict=True):
            if used is not grad:
                grad.copy_(used)


def _are_native_and_contiguous(tensors: TensorLists) -> bool:
    """Return whether :func:`has_native_kernel` is true for all parameters, in a few passes without Python's calls."""
    return (
        all(map(_is_cpu, tensors.params))
        and set(map(_dtype_of, tensors.params)) <= set(_NATIVE_DTYPES)
        and all(map(Tensor.is_contiguous, chain.from_iterable(tensors[:5])))
    )


def batches(params: list[Tensor], limit: int) -> Iterator[slice]:
    """Split a list into batches of at most ``limit`` elements; a larger parameter gets its own batch."""
    sizes = [param.numel() for param in params]
    if sum(sizes) <= limit:
        yield slice(0, len(params))
        return
    start = elements = 0
    for i, size in enumerate(sizes):
        if i > start and elements + size > limit:
            yield slice(start, i)
            start, elements = i, 0
        elements += size
    yield slice(start, len(params))


def _update_in_batches(tensors: TensorLists, options: Options) -> None:
    parts = list(batches(tensors.params, _CACHED_ELEMENTS))
    for part in parts:
        _update_batch(tensors.part(part) if len(parts) > 1 else tensors, options)


def _update_batch(batch: TensorLists, options: Options) -> None:
    if options.bias_correction:
        has_several = any(map(Tensor.dim, batch.steps))
        steps = [step[0] if step.dim() else step for step in batch.steps] if has_several else batch.steps
    else:
        # The kernel always divides by 1 - beta**step, which is 1 for any beta after this many steps.
        steps = [torch.tensor(2**62, device="cpu")] * len(batch.steps)
    native_adam = fused_adamw_ if options.decoupled_weight_decay else fused_adam_
    adam = {
        "lr": options.lr,
        "beta1": options.beta1,
        "beta2": options.beta2,
        "weight_decay": options.weight_decay,
        "eps": options.eps,
        "amsgrad": False,
        "maximize": options.maximize,
        "grad_scale": options.grad_scale,
    }
    foreach_add_(batch.steps, 1)
    for params, grads, exp_avgs, exp_avg_sqs, ema_params in _pieces(batch):
        native_adam(params, grads, exp_avgs, exp_avg_sqs, [], steps, **adam)
        if options.ema_decay != 1:
            foreach_lerp_(ema_params, params, float(1 - options.ema_decay))
    if batch.rounded:
        foreach_copy_(batch.rounded, batch.params)


def _pieces(batch: TensorLists) -> list[list[list[Tensor]]]:
    """Split a parameter that is longer than a batch; return the lists without steps."""
    lists = list(batch[:5])
    if len(batch.params) > 1 or batch.params[0].numel() <= _CACHED_ELEMENTS or not batch.params[0].is_contiguous():
        return [lists]
    cut = (tensors[0].view(-1).split(_CACHED_ELEMENTS) for tensors in lists)
    return [[[tensor] for tensor in piece] for piece in zip(*cut, strict=True)]


def has_native_kernel(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ema_param: Tensor) -> bool:
    """Return whether PyTorch's fused CPU kernels support a parameter and its states.

    They round 16-bit state differently, and process elements in memory order, regardless of strides.
    """
    if not param.is_cpu or param.dtype not in _NATIVE_DTYPES:
        return False
    if param.is_contiguous():
        return exp_avg.is_contiguous() and exp_avg_sq.is_contiguous() and ema_param.is_contiguous()
    strides = param.stride()
    return is_dense(param) and exp_avg.stride() == exp_avg_sq.stride() == ema_param.stride() == strides


def implementation_for(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ema_param: Tensor
) -> tuple[Implementation, str]:
    """Return which implementation updates a parameter in eager mode, and CANN's operator or the reason."""
    if param.device.type == "npu":
        why_not = why_not_cann(param)
        if why_not is None:
            return Implementation.CANN, apply_fused_ema_adam_.cann
        return Implementation.FALLBACK, why_not
    reason = f"the tensors are on {param.device.type}"
    if has_native_kernel(param, exp_avg, exp_avg_sq, ema_param):
        return Implementation.TORCH, reason
    if param.is_cpu:
        reason += f" in {param.dtype}" if param.dtype not in _NATIVE_DTYPES else " and not dense"
    return Implementation.FALLBACK, reason


def _match_strides(param: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient with its parameter's strides."""
    if (param.is_contiguous() and grad.is_contiguous()) or grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)
