"""The kernels of a step of FusedEmaAdam, which give the same results, and what they are given.

``single_tensor`` calls the operator once per parameter, on any device and under ``torch.compile``; ``multi_tensor``
gives lists to torch's own CPU kernels, whose ``lerp`` makes an infinite average nan, as it does in ``swa_utils``.
Flattened parameters go through the same two, as few and long ones.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from torch_aclnn_ops._paths import is_logging, log_path
from torch_aclnn_ops._torch_compat.optimizer import (
    foreach_add_,
    foreach_copy_,
    foreach_lerp_,
    fused_adam_,
    fused_adamw_,
    version_of,
)
from torch_aclnn_ops.ops import apply_fused_ema_adam_
from torch_aclnn_ops.ops.ema_adam.apply import apply_with_tensor_lr_, moved_average
from torch_aclnn_ops.ops.ema_adam.step_progress import Call, StepProgress

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Options", "TensorLists", "batches", "has_native_kernel", "is_dense", "is_plain", "local", "update"]

# Elements that torch's kernels take at a time: the average then finds the new weights in the cache. A multiple of a
# cache line, so that no element changes between the kernel's vector and scalar code, which round differently.
_CACHED_ELEMENTS = 2**20
_NATIVE_DTYPES = (torch.float32, torch.float64) if fused_adam_ and fused_adamw_ else ()


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
    """The tensors of a step; those at one place of the lists belong to one parameter.

    Where ``params`` are master weights, ``rounded`` are the parameters, which get a copy of them; else it is empty.
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


def update(tensors: TensorLists, options: Options, progress: StepProgress) -> None:
    """Increment the steps, and update the parameters and their states; the tensors must fit each other.

    Of a step with several elements all are incremented and the first one counts. What belongs to a parameter changes
    together: nothing is written before all that may fail was done, as far as that is possible.
    """
    if torch.compiler.is_compiling():  # where only the operator can be traced, and no value can be read
        if not isinstance(options.lr, Tensor):  # a number would be part of the code, compiled again for each
            options = options._replace(lr=torch.ones((), dtype=torch.float64, device="cpu") * options.lr)
        single_tensor(tensors, options, progress)
        return
    if is_logging():  # on an NPU the operator tells it
        lists = zip(tensors.params, *tensors[2:5], strict=True)
        for path in {describe_path(*one) for one in lists if one[0].device.type != "npu"}:
            log_path(apply_fused_ema_adam_.name, partial(str, path))
    lr, ema_decay, found_inf = _read(options.lr), _read(options.ema_decay), options.found_inf
    if found_inf is not None and found_inf.is_cpu:
        if found_inf.item():
            return
        found_inf = None
    if lr is not options.lr or ema_decay is not options.ema_decay or found_inf is not options.found_inf:
        options = options._replace(lr=lr, ema_decay=ema_decay, found_inf=found_inf)
    if isinstance(lr, Tensor) or isinstance(ema_decay, Tensor) or found_inf is not None:
        single_tensor(tensors, options, progress)
        return
    is_native = list(map(has_native_kernel, tensors.params, *tensors[2:5]))
    if all(is_native):
        multi_tensor(tensors, options, progress)
    else:
        multi_tensor(tensors.select(is_native), options, progress)
        single_tensor(tensors.select([not native for native in is_native]), options, progress)


def _read(option: float | Tensor) -> float | Tensor:
    """Read a tensor where that waits for no device."""
    return option.item() if isinstance(option, Tensor) and option.is_cpu else option


def single_tensor(tensors: TensorLists, options: Options, progress: StepProgress) -> None:
    """Do a step by one call of the operator per parameter."""
    for i in range(len(tensors.params)):
        _update_one(tensors.part(slice(i, i + 1)), options, progress)


def _update_one(one: TensorLists, options: Options, progress: StepProgress) -> None:
    (param,), (grad,), (exp_avg,), (exp_avg_sq,), (ema_param,), (step,), rounded = one
    states = (param, exp_avg, exp_avg_sq, ema_param)
    calls: list[Call] = []
    if options.grad_scale is not None:
        given, grad = grad, grad / options.grad_scale.to(grad.device)
        calls.append(partial(Tensor.copy_, given, grad))
    calls += [partial(Tensor.copy_, copy, param) for copy in rounded]
    applied = options.ema_decay, options.found_inf, None if _is_taken(options.lr) else options.lr
    is_on_device = any(isinstance(option, Tensor) for option in applied)
    if is_on_device or not _is_one_call(grad, *states, step):
        new_states, new_step = _updated(options, states, grad, step)
        writes = zip((*states, step), (*new_states, new_step), strict=True)
        progress.run([*(partial(Tensor.copy_, old, new) for old, new in writes), *calls], [step])
        return
    count, undo = (partial(Tensor.add_, step, by) for by in (1, -1))
    before = _version_of(param)
    progress.run(
        [count, _operator(options, grad, *states, step), *calls],
        [step],
        undo,
        lambda: _version_of(param) != before,
    )


def _is_one_call(*tensors: Tensor) -> bool:
    """Return whether the operator writes to all states by one call, which is refused before it writes, or not."""
    if torch.compiler.is_compiling():
        return True
    return tensors[0].device.type == "npu" and apply_fused_ema_adam_.why_not_cann(*tensors) is None


def _version_of(tensor: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or tensor.is_inference() else version_of(tensor)


def _is_taken(lr: float | Tensor) -> bool:
    """Return whether the operator takes a learning rate: compiled code gives it in a tensor."""
    return not isinstance(lr, Tensor) or (torch.compiler.is_compiling() and lr.is_cpu)


def _operator(options: Options, grad: Tensor, *states_and_step: Tensor) -> Call:
    """Return the call of the operator."""
    # A direct call on an NPU is CANN's operator alone; this one falls back on its formula on a chip without it.
    call = apply_fused_ema_adam_.run if grad.device.type == "npu" else apply_fused_ema_adam_
    return partial(
        apply_with_tensor_lr_ if isinstance(options.lr, Tensor) else call,
        -grad if options.maximize else grad,
        *states_and_step,
        options.lr,
        options.ema_decay,
        options.beta1,
        options.beta2,
        options.eps,
        int(options.decoupled_weight_decay),
        options.bias_correction,
        options.weight_decay,
    )


def _updated(options: Options, states: Sequence[Tensor], grad: Tensor, step: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return new states and a new step, with tensor options applied on the device."""
    lr, ema_decay, found_inf = options.lr, options.ema_decay, options.found_inf
    new_states, new_step = [state.clone() for state in states], step + 1
    # With 1 for a tensor the operator leaves out what that would do.
    is_on_device = not _is_taken(lr) or isinstance(ema_decay, Tensor)
    taken = options._replace(lr=lr if _is_taken(lr) else 1.0, ema_decay=1.0 if is_on_device else ema_decay)
    _operator(taken, grad, *new_states, new_step)()
    new_param, new_average = new_states[0], new_states[-1]
    if isinstance(lr, Tensor) and not _is_taken(lr):
        new_param.copy_(states[0].lerp(new_param, lr.reshape(()).to(new_param)))
    if is_on_device:
        share = 1 - ema_decay
        share = share.reshape(()).to(new_average) if isinstance(share, Tensor) else share
        new_states[-1] = moved_average(new_average, new_param, share)
    if found_inf is not None:
        is_skipped = found_inf.reshape(()).to(step.device) != 0
        new_states = [torch.where(is_skipped, old, new) for old, new in zip(states, new_states, strict=True)]
        new_step = torch.where(is_skipped, step, new_step)
    return new_states, new_step


def multi_tensor(tensors: TensorLists, options: Options, progress: StepProgress) -> None:
    """Do a step by torch's kernels for lists; for tensors that have one, see ``has_native_kernel``."""
    if tensors.params:
        tensors = tensors._replace(grads=list(map(_laid_out_as, tensors.params, tensors.grads)))
        parts = list(batches(tensors.params, _CACHED_ELEMENTS))
        for part in parts:
            _update_batch(tensors.part(part) if len(parts) > 1 else tensors, options, progress)


def _update_batch(batch: TensorLists, options: Options, progress: StepProgress) -> None:
    if options.bias_correction:
        steps = [step if step.dim() == 0 else step[0] for step in batch.steps]
    else:
        # The kernel always divides by 1 - beta**step, which is 1 for every beta after this many steps.
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
    calls = [partial(foreach_add_, batch.steps, 1)]
    for params, grads, exp_avgs, exp_avg_sqs, ema_params in _pieces(batch):
        calls.append(partial(native_adam, params, grads, exp_avgs, exp_avg_sqs, [], steps, **adam))
        if options.ema_decay != 1:
            calls.append(partial(foreach_lerp_, ema_params, params, float(1 - options.ema_decay)))
    if batch.rounded:
        calls.append(partial(foreach_copy_, batch.rounded, batch.params))
    progress.run(calls, batch.steps, partial(foreach_add_, batch.steps, -1))


def _pieces(batch: TensorLists) -> list[list[list[Tensor]]]:
    """Cut a parameter that is longer than a batch; return the lists without steps."""
    lists = list(batch[:5])
    if len(batch.params) > 1 or batch.params[0].numel() <= _CACHED_ELEMENTS or not batch.params[0].is_contiguous():
        return [lists]
    cut = (tensors[0].view(-1).split(_CACHED_ELEMENTS) for tensors in lists)
    return [[[tensor] for tensor in piece] for piece in zip(*cut, strict=True)]


def has_native_kernel(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ema_param: Tensor) -> bool:
    """Return whether torch's own CPU kernels compute the operator for a parameter.

    They round 16-bit state in other places, and go through all tensors in the order of memory, whatever the strides.
    """
    if not param.is_cpu or param.dtype not in _NATIVE_DTYPES:
        return False
    if param.is_contiguous():
        return exp_avg.is_contiguous() and exp_avg_sq.is_contiguous() and ema_param.is_contiguous()
    strides = param.stride()
    return is_dense(param) and exp_avg.stride() == exp_avg_sq.stride() == ema_param.stride() == strides


def describe_path(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, ema_param: Tensor) -> str:
    """Say by what a parameter is updated outside of compiled code, and why."""
    param, exp_avg, exp_avg_sq, ema_param = map(local, (param, exp_avg, exp_avg_sq, ema_param))
    if param.device.type == "npu":
        reason = apply_fused_ema_adam_.why_not_cann(param)
        return apply_fused_ema_adam_.cann if reason is None else f"PyTorch fallback, because {reason}"
    reason = f"the tensors are on {param.device.type}"
    if has_native_kernel(param, exp_avg, exp_avg_sq, ema_param):
        return f"native PyTorch kernels, because {reason}"
    if param.is_cpu:
        reason += f" in {param.dtype}" if param.dtype not in _NATIVE_DTYPES else " and have gaps"
    return f"PyTorch fallback, because {reason}"


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
