"""One step on lists of parameters: gradients, their scaling, master weights, EMA schedule, and captures in graphs."""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from operator import is_
from typing import Any

from torch_aclnn_ops._tensors import DTYPES, is_dtensor, is_plain
from torch_aclnn_ops._torch_compat.private import foreach_copy_, foreach_lerp_, per_optimizer_state
from torch_aclnn_ops.functional.ema_adam import mismatch
from torch_aclnn_ops.ops.ema_adam import Options, TensorLists, is_float64_on_npu, lerp, mark_modified
from torch_aclnn_ops.ops.ema_adam.kernels import batches, by_device, update
from torch_aclnn_ops.optim.options import EmaSchedule
from torch_aclnn_ops.optim.state import CachedState, has_state

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

# Elements whose 16-bit gradients are upcast at a time.
_UPCAST_ELEMENTS = 2**24


def grad_scaling(optimizer: Any, grad_scaler: Any = None) -> tuple[Tensor | None, Tensor | None]:
    """Return ``grad_scale`` and ``found_inf`` of a gradient scaler.

    ``torch.amp`` sets them as attributes of the optimizer; torch_npu passes its scaler as an argument.
    """
    if grad_scaler is None:
        attributes = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
        # If no parameter has a gradient, found_inf is the sum of no tensors.
        grad_scale, found_inf = [one if isinstance(one, Tensor) else None for one in attributes]
        # Without found_inf, a program has set grad_scale, for all steps.
        if grad_scale is not None and found_inf is not None and not torch.compiler.is_compiling():
            optimizer.grad_scale = 1  # by what a step that raises leaves there, the scaler multiplies the next scale
        return grad_scale, found_inf
    scaler_state = per_optimizer_state(grad_scaler, optimizer)
    if scaler_state["stage"].value == OptState.READY.value:
        grad_scaler.unscale_(optimizer)
    found = list(scaler_state["found_inf_per_device"].values())  # none if no parameter has a gradient
    return None, torch.stack([one.to(found[0].device) for one in found]).sum(0) if found else None


def are_states_missing(optimizer: Optimizer) -> bool:
    """Return whether a parameter gets its first update, from which its EMA starts."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return any(param.grad is not None and not has_state(optimizer.state, param) for param in params)


def step_lists(tensors: TensorLists, options: Options, schedule: EmaSchedule, counts: Sequence[int] = ()) -> None:
    """Update the parameters of a list.

    ``tensors.rounded`` are the parameters, with gradients of their dtype; ``tensors.params`` are their float32 master
    weights, or the same parameters. ``counts`` are their step counts, if the host knows them.
    """
    if not torch.compiler.is_compiling():
        mark_modified(tensors.rounded)
    if not _are_plain(tensors.rounded):
        pairs: Iterable[tuple[Any, Any]] = zip(tensors.grads, tensors.rounded, strict=True)
        grads = [one.redistribute(placements=param.placements) if is_dtensor(param) else one for one, param in pairs]
        tensors = tensors._replace(grads=grads).local()
    if schedule.is_constant:
        _update(tensors, options)
        return
    by_decay = defaultdict(set)
    for count in set(counts):
        by_decay[schedule.decay_at(count + 1)].add(count)
    for known_decay, members in by_decay.items():
        lists = tensors if len(by_decay) == 1 else tensors.select([count in members for count in counts])
        _update(lists, options._replace(ema_decay=known_decay))
    if tensors.params and not counts:  # each parameter gets the decay of its own count, computed on a device
        steps = [step.flatten()[0] for step in tensors.steps]
        decays = schedule.decays_at(torch.stack([step.to(steps[0].device) for step in steps]) + 1)
        for i, decay in enumerate(decays.unbind()):
            _update(tensors.part(slice(i, i + 1)), options._replace(ema_decay=decay))


def _are_plain(tensors: Iterable[Tensor]) -> bool:
    if torch.compiler.is_compiling():
        return all(map(is_plain, tensors))
    return set(map(type, tensors)) <= {Tensor, Parameter}


def _update(tensors: TensorLists, options: Options) -> None:
    """Update with the decay in the options; gradients of parameters with master weights are upcast first."""
    if not torch.compiler.is_compiling() and all(map(is_, tensors.rounded, tensors.params)):
        update(tensors._replace(rounded=[]), options)
        return
    is_rounded = [param.dtype != master.dtype for param, master in zip(tensors.rounded, tensors.params, strict=True)]
    if not any(is_rounded):
        update(tensors._replace(rounded=[]), options)
        return
    update(tensors.select([not rounded for rounded in is_rounded])._replace(rounded=[]), options)
    rounded = tensors.select(is_rounded)
    for part in batches(rounded.params, _UPCAST_ELEMENTS):
        batch = rounded.part(part)
        grads = _upcast(batch)
        update(batch._replace(grads=grads), options)
        if options.grad_scale is not None and not torch.compiler.is_compiling():
            foreach_copy_(batch.grads, grads)  # they are unscaled


def _upcast(tensors: TensorLists) -> list[Tensor]:
    """Return the gradients in the dtype of the master weights."""
    if torch.compiler.is_compiling():
        return [grad.to(master.dtype) for grad, master in zip(tensors.grads, tensors.params, strict=True)]
    grads = [torch.empty_like(grad, dtype=tensors.params[0].dtype) for grad in tensors.grads]
    foreach_copy_(grads, tensors.grads)
    return grads


def step_cached(cached: CachedState, tensors: TensorLists, options: Options, schedule: EmaSchedule) -> None:
    """Update parameters of a group that are not flattened."""
    counts, steps = cached.counts, cached.lists[3]
    if schedule.is_constant or not counts.are_exact:
        step_lists(tensors, options, schedule)
    else:
        counts.read()
        stepped: Sequence[int] = range(len(steps))
        if len(tensors.steps) < len(steps):
            places = {id(step): i for i, step in enumerate(steps)}
            stepped = [places[id(step)] for step in tensors.steps]
        values = [counts.values[i] for i in stepped] if counts.are_exact else []
        counts.forget()
        step_lists(tensors, options, schedule, values)
        counts.record(stepped)
    cached.versions.record()


def update_ema_params(tensors: TensorLists, steps: list[Tensor], options: Options, schedule: EmaSchedule) -> None:
    """Update the EMA weights of parameters without a gradient.

    Their step counts do not advance, so the schedule uses the largest step count of all parameters of the optimizer:
    ``steps`` are the counts of all of them after this step.
    """
    weight = 1 - _decay(steps, tensors.steps[0].device, schedule)
    if not isinstance(weight, Tensor) and weight == 0:
        return
    found_inf = options.found_inf
    if found_inf is not None and (torch.compiler.is_compiling() or not found_inf.is_cpu):
        applies = found_inf.reshape(()) == 0
        weight = (applies.to(weight.device) if isinstance(weight, Tensor) else applies) * weight
    tensors = tensors.local()
    if isinstance(weight, Tensor) or any(map(is_float64_on_npu, tensors.ema_params)):
        for old, new in zip(tensors.ema_params, tensors.params, strict=True):
            share = weight.to(old.device, old.dtype) if isinstance(weight, Tensor) else weight
            old.copy_(lerp(old, new, share)) if is_float64_on_npu(old) else old.lerp_(new, share)
    else:
        for part in by_device(tensors):
            foreach_lerp_(part.ema_params, part.params, weight)


def _decay(steps: list[Tensor], device: torch.device, schedule: EmaSchedule) -> float | Tensor:
    if schedule.is_constant:
        return schedule.ema_decay
    if not torch.compiler.is_compiling() and all(step.is_cpu for step in steps):
        return schedule.decay_at(max(int(step.max()) for step in steps))
    return schedule.decays_at(torch.stack([step.max().to(device) for step in steps]).max())


def check_gradients(groups: list[dict[str, Any]], known: Collection[int]) -> None:
    """Raise for gradients that a step does not support, except of the ``known`` groups, by index."""
    for i, group in enumerate(groups):
        if i in known:
            continue
        for j, param in enumerate(group["params"]):
            grad = param.grad
            # PyTorch guarantees that a gradient has its parameter's shape and device.
            are_plain = type(grad) is Tensor and type(param) is Parameter
            if grad is None or (are_plain and grad.dtype is param.dtype in DTYPES and grad.layout is torch.strided):
                continue
            reason = mismatch(grad, param)
            if reason:
                raise RuntimeError(f"FusedEmaAdam: the gradient of parameter {j} of group {i} {reason}")


_NEW_STATES = "load_state_dict(), add_param_group(), a first gradient of a parameter, or new data of one"


class Captures:
    """Whether steps of an optimizer are, or were, captured."""

    def __init__(self) -> None:
        self.has_captured = self.is_capturing = False
        self.has_compiled = False  # a compiled step may be captured without a call of this class
        self._types: set[str] = set()

    def observe(self, groups: list[dict[str, Any]], schedules: list[EmaSchedule], has_changed: bool) -> None:
        """Note whether this step is captured; raise if a group's EMA decay depends on the step."""
        if has_changed:
            self._types = {param.device.type for group in groups for param in group["params"]} - {"cpu", "meta"}
        self.is_capturing = any(map(_is_capturing, self._types))
        self.has_captured |= self.is_capturing
        for i, schedule in enumerate(schedules if self.is_capturing else ()):
            if not schedule.is_constant:
                raise RuntimeError(
                    "FusedEmaAdam.step: a captured step must have a constant EMA decay, because each replay uses that"
                    f" of the capture, but group {i} has ema_warmup={schedule.ema_warmup!r},"
                    f" ema_start_step={schedule.ema_start_step} and ema_update_every={schedule.ema_update_every}; use"
                    " None, 0 and 1, or do not capture the step"
                )

    def are_counts_known(self, found_inf: Tensor | None) -> bool:
        """Return whether the host knows the step counts of a device, which may skip steps and repeat captured ones."""
        may_be_replayed = self.has_captured or self.has_compiled
        return not may_be_replayed and (found_inf is None or found_inf.is_cpu)

    def before_new_states(self) -> None:
        """Raise if a captured step would initialize states, as each replay would; warn if it makes graphs obsolete."""
        if self.is_capturing:
            raise RuntimeError(
                "FusedEmaAdam.step: a captured step must not initialize states, because each replay would, too; call"
                f" step() once before the capture, and after {_NEW_STATES}"
            )
        self.warn_of_new_states(stacklevel=8)

    def warn_of_new_states(self, stacklevel: int) -> None:
        """Warn if graphs were captured, whose replays update the earlier states."""
        if self.has_captured:
            warnings.warn(
                "FusedEmaAdam: graphs of earlier steps must be captured again, because the optimizer's states are new"
                f" tensors after {_NEW_STATES}",
                stacklevel=stacklevel,
            )


def _is_capturing(device_type: str) -> bool:
    """Return whether a graph is being captured on the current device of a type."""
    module = torch.get_device_module(device_type)
    if not hasattr(module, "is_current_stream_capturing"):
        return False
    module.current_device()  # raises in a forked process, where the next call would hang on an NPU
    return bool(module.is_current_stream_capturing())
