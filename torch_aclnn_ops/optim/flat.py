"""Flattened parameters: contiguous buffers for the weights, gradients and states of the parameters of a group."""

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch_aclnn_ops._cpu_extension import have_grads, holds, placement
from torch_aclnn_ops._tensors import is_dense, is_plain
from torch_aclnn_ops._torch_compat.private import foreach_copy_, is_in_fsdp1_unit
from torch_aclnn_ops.ops.ema_adam import Options, TensorLists, empty_lists
from torch_aclnn_ops.optim.options import EmaSchedule
from torch_aclnn_ops.optim.state import (
    StepCounts,
    Versions,
    dtype_of_states,
    has_state,
    init_missing_state,
    sync_master_from_param,
)
from torch_aclnn_ops.optim.step import step_lists

import torch
from torch import Tensor
from torch.utils import dlpack

_ALIGNMENT = 512  # byte alignment of parameters, as in the NPU allocator
_CACHE_LINE = 64  # bytes per iteration of PyTorch's vectorized CPU kernels; a remainder uses scalar code


class Run(NamedTuple):
    """Adjacent parameters of a buffer with the same step count, which are updated together as one long tensor."""

    members: slice
    tensors: TensorLists  # with one tensor in each list


class FlatBuffer:
    """The buffers of the parameters of one group, dtype and device.

    Parameters, gradients and states are views of the buffers. What a program assigns in their place is copied in by the
    next step, and replaced by the view.
    """

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype) -> None:
        # Parameters with a remainder for scalar code come last, so that the others form one run.
        self.params = sorted(params, key=lambda param: param.nbytes % _CACHE_LINE != 0)
        first = self.params[0]
        alignment = _ALIGNMENT // first.element_size()
        self._begins = [0]
        for param in self.params:
            self._begins.append(self._begins[-1] + -(-param.numel() // alignment) * alignment)
        size = self._begins[-1]
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.weights)
        names = ["exp_avg", "exp_avg_sq", "ema_params"] + ["master_params"] * (dtype != first.dtype)
        self.states = {name: torch.zeros(size, dtype=dtype, device=first.device) for name in names}
        self.steps = torch.zeros(len(self.params), dtype=torch.int64, device=first.device)
        self._strides = list(map(Tensor.stride, self.params))
        self._param_views, self._grad_views = self._views(self.weights), self._views(self.grads)
        self._placement = placement(self._grad_views)
        self._own_states: dict[int, dict[str, Tensor]] = {}  # by the index of the parameter
        self.counts = StepCounts([self.steps])
        # The runs if all parameters have gradients and the same step count.
        self._full_runs = self._runs([True] * len(self.params), [0] * len(self.params))
        self._has_own_grads = self._has_all_grads = False  # in this and in the last step
        self._is_captured = False  # by a graph, which updates all parameters
        self._versions = Versions(self.params if dtype != first.dtype else [])

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [self._view(buffer, i) for i in range(len(self.params))]

    def _view(self, buffer: Tensor, i: int) -> Tensor:
        """Return a view of a parameter's part of a buffer, in the parameter's shape."""
        param = self.params[i]
        # A separate storage over the same memory: pickling then excludes the rest of the buffer, and safetensors and
        # accelerate do not take the parameters for tied ones.
        # torch_npu, which may be imported after this module, replaces the function.
        part = dlpack.from_dlpack(buffer[self._begins[i] : self._begins[i] + param.numel()])
        return part.as_strided(param.shape, self._strides[i])

    def takes_params(self) -> bool:
        """Return whether the parameters fit their views, so that they can be copied in."""
        return all(
            is_plain(param)
            and not _is_shared(param)
            and (param.shape, param.dtype, param.device) == (view.shape, view.dtype, view.device)
            for param, view in zip(self.params, self._param_views, strict=True)
        )

    def take(self, states: MutableMapping[Tensor, Any]) -> None:
        """Copy parameters and states that a program has assigned, and new states, into the buffers, to be views."""
        moved = _moved(self.params, self._param_views)
        assigned = [_kept(self.params[i].detach(), self.weights) for i in moved]
        for i, values in zip(moved, assigned, strict=True):
            self._param_views[i].copy_(values)
            self.params[i].data = self._param_views[i]
        self._versions = Versions(self._versions.params)
        own = {i: one for i, one in self._own_states.items() if _has(states.get(self.params[i], {}), one)}
        buffers, assigned_states = {**self.states, "step": self.steps}, {}
        for i, param in enumerate(self.params):
            if i not in own and (param.grad is not None or has_state(states, param)):
                init_missing_state(states[param], param, self.states["exp_avg"].dtype)
                assigned_states[i] = {name: _kept(states[param][name], buffers[name]) for name in buffers}
        if missing := [i for i in range(len(self.params)) if i not in own and i not in assigned_states]:
            self.steps[missing] = 0
        for i, of_param in assigned_states.items():
            views = {name: self._view(buffer, i) for name, buffer in self.states.items()}
            # On a device, writes are found by the version counter, which a separate storage does not share.
            views["step"] = dlpack.from_dlpack(self.steps[i]) if self.steps.is_cpu else self.steps[i]
            own[i] = {name: view.copy_(of_param[name]) for name, view in views.items()}
            states[self.params[i]].update(own[i])
        self._own_states = own
        self.counts = StepCounts([self.steps])

    def has_own_grads(self) -> bool:
        """Return whether all gradients are views of their buffer; :meth:`gather` uses this, too."""
        are_views = have_grads(self.params, self._grad_views)
        self._has_own_grads = are_views and placement(self._grad_views) == self._placement
        return self._has_own_grads

    def gather(self, is_capturing: bool) -> list[Run]:
        """Copy assigned gradients into their buffer, and return the runs to update."""
        self.counts.read()
        has_own_grads, self._has_own_grads = self._has_own_grads, False  # it holds for this step only
        has_grad = [True] * len(self.params) if has_own_grads else [param.grad is not None for param in self.params]
        self._has_all_grads = all(has_grad)
        self._check_captured(has_grad, is_capturing)
        if self._has_all_grads and len(set(self.counts.values)) == 1:
            runs = self._full_runs
        else:
            runs = self._runs(has_grad, self.counts.values)
        if not has_own_grads:
            if placement(self._grad_views) != self._placement:
                # A program has changed the views themselves, for example by grad.data = ...: copy their new values in.
                views = self._views(self.grads)
                for i in _moved(self._grad_views, views):
                    self._grad_views[i] = views[i]
            self._take_grads()
        if self._versions.are_modified():
            sync_master_from_param(self.states["master_params"], self.weights)
        return runs

    def _check_captured(self, has_grad: list[bool], is_capturing: bool) -> None:
        """Raise if a captured step updates only some of the parameters, or a later one does: counts would differ."""
        self._is_captured |= is_capturing
        if self._is_captured and not self._has_all_grads and any(has_grad):
            raise RuntimeError(
                "FusedEmaAdam.step: with flatten=True, a captured graph updates parameters with one step count, so that"
                " in it and in later steps all of them must have a gradient or none, but"
                f" {sum(has_grad)} of {len(has_grad)} have one; capture the graph with flatten=False"
            )

    def _runs(self, is_chosen: list[bool], counts: list[Any]) -> list[Run]:
        runs: list[slice] = []
        for i, chosen in enumerate(is_chosen):
            # Scalar and vectorized CPU code round differently. So that flattening does not change results, a tensor
            # with a remainder is not merged with the next one.
            joins = not self.weights.is_cpu or self.params[i].nbytes % _CACHE_LINE == 0
            if chosen and joins and runs and runs[-1].stop == i and counts[i] == counts[i - 1]:
                runs[-1] = slice(runs[-1].start, i + 1)
            elif chosen:
                runs.append(slice(i, i + 1))
        return list(map(self._run, runs))

    def _run(self, members: slice) -> Run:
        last = members.stop - 1
        part = slice(self._begins[members.start], self._begins[last] + self.params[last].numel())
        weights, grads = self.weights[part], self.grads[part]
        states = {name: buffer[part] for name, buffer in self.states.items()}
        masters, moments = states.get("master_params", weights), (states["exp_avg"], states["exp_avg_sq"])
        tensors = (masters, grads, *moments, states["ema_params"], self.steps[members], weights)
        return Run(members, TensorLists(*([one] for one in tensors)))

    def _take_grads(self) -> None:
        """Copy assigned gradients into the buffer, and replace them by its views."""
        pairs = enumerate(zip(self.params, self._grad_views, strict=True))
        fresh = {i: param.grad for i, (param, view) in pairs if param.grad is not None and param.grad is not view}
        if fresh:
            grads = [_kept(grad, self.grads) for grad in fresh.values()]
            foreach_copy_([self._grad_views[i] for i in fresh], grads)
        for i in fresh:
            self.params[i].grad = self._grad_views[i]

    def without_grad(self) -> TensorLists:
        """Return the parameters without a gradient that have a state."""
        if self._has_all_grads:
            return empty_lists()
        is_ema_updated = [param.grad is None and i in self._own_states for i, param in enumerate(self.params)]
        return _lists_of(self._runs(is_ema_updated, [0] * len(self.params)))

    def step(self, runs: list[Run], options: Options, schedule: EmaSchedule) -> None:
        """Update the parameters that have gradients, as a few long tensors."""
        counts = [self.counts.values[run.members.start] for run in runs] if self.counts.are_exact else []
        self.counts.forget()
        for run in runs:  # before the step, which may fail
            torch.autograd.graph.increment_version(self.params[run.members])
        step_lists(_lists_of(runs), options, schedule, counts)
        if not self.steps.is_cpu:
            self.counts.record([i for run in runs for i in range(run.members.start, run.members.stop)])
        self._versions.record()


def _lists_of(runs: list[Run]) -> TensorLists:
    tensors = empty_lists()
    for run in runs:
        for listed, one in zip(tensors, run.tensors, strict=True):
            listed += one
    return tensors


def _moved(tensors: list[Tensor], views: list[Tensor]) -> list[int]:
    """Return the indices of the tensors that are not where their views are."""
    pairs = enumerate(zip(tensors, views, strict=True))
    return [i for i, (one, view) in pairs if one.data_ptr() != view.data_ptr() or one.stride() != view.stride()]


def _is_shared(param: Tensor) -> bool:
    """Return whether a parameter is in shared memory, to which its storage, also that of its view, may have moved."""
    return param.is_cpu and param.is_shared()  # torch calls all memory of some devices shared


def _kept(values: Tensor, buffer: Tensor) -> Tensor:
    """Return what a program has assigned; a copy if it lies in the buffer, which is overwritten before it is read."""
    begin = buffer.data_ptr()
    is_inside = values.device == buffer.device and begin <= values.data_ptr() < begin + buffer.nbytes
    return values.clone() if is_inside else values


def _has(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Return whether a state has exactly these tensor objects."""
    return all(state.get(name) is one for name, one in tensors.items())


class FlatGroup:
    """The buffers of a parameter group, and its parameters that cannot be flattened."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._params, self._master_weights = list(group["params"]), group["master_weights"]
        by_kind: dict[Any, list[Tensor]] = defaultdict(list)
        self.rest: list[Tensor] = []
        for param in self._params:
            listed = by_kind[param.dtype, param.device] if can_flatten(param) else self.rest
            listed.append(param)
        self.buffers: list[FlatBuffer] = [
            FlatBuffer(params, dtype_of_states(params[0], group["master_weights"])) for params in by_kind.values()
        ]

    def fits(self, group: dict[str, Any]) -> bool:
        """Return whether the buffers are those of the group's parameters."""
        return (
            group["master_weights"] == self._master_weights
            and holds([group["params"]], self._params)
            and all(buffer.takes_params() for buffer in self.buffers)
        )

    def has_own_grads(self) -> bool:
        """Return whether all parameters are flattened and all gradients are views of their buffers."""
        return all([buffer.has_own_grads() for buffer in self.buffers]) and not self.rest  # each buffer notes it


def can_flatten(param: Tensor) -> bool:
    """Return whether a parameter can be moved into a buffer.

    It cannot if it has no memory, belongs to FSDP1, which keeps views of it, is a part of a larger storage, or is in
    shared memory, which other processes read.
    """
    if not is_plain(param) or is_in_fsdp1_unit(param) or param.numel() == 0 or param.layout != torch.strided:
        return False
    if not param.is_floating_point() or param.is_meta or not (param.requires_grad or param.grad is not None):
        return False
    if _is_shared(param):
        return False
    return param.untyped_storage().nbytes() == param.nbytes and is_dense(param)
