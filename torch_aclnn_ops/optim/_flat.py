"""Flattened parameters: contiguous buffers for the weights, gradients and states of many parameters."""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch_aclnn_ops._torch_compat.optimizer import foreach_copy_, has_alias, storage_uses
from torch_aclnn_ops.optim._counts import Captures, StepCounts
from torch_aclnn_ops.optim._states import (
    CachedState,
    has_state,
    init_missing_state,
    sync_master_from_param,
)
from torch_aclnn_ops.optim._without_grad import ParamsWithoutGrad

import torch
from torch import Tensor
from torch.utils import dlpack

_ALIGNMENT = 512  # byte alignment of parameters, as in the NPU allocator
_CACHE_LINE = 64  # bytes per iteration of PyTorch's vectorized CPU kernels; a remainder uses scalar code
_grad_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")


class Run(NamedTuple):
    """Adjacent parameters of a buffer with the same step count, which are updated together as one long tensor.

    The tensors are those of ``TensorLists``, in the same order.
    """

    members: slice
    masters: Tensor
    grads: Tensor
    exp_avgs: Tensor
    exp_avg_sqs: Tensor
    ema_params: Tensor
    steps: Tensor
    weights: Tensor


class FlatBuffer:
    """The buffers of the parameters of one group, dtype and device.

    Gradients and states become views of the buffers, and :meth:`replace_params` makes the parameters views too, so
    that other code can continue to use them.

    Args:
        params: The parameters, for which ``can_flatten`` returned true.
        dtype: The dtype of the states.
        states: The optimizer's states; those of the parameters are moved into the buffers.
    """

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype, states: MutableMapping[Tensor, Any]) -> None:
        # Parameters with a remainder for scalar code come last, so that the others form one run.
        self.params = sorted(params, key=lambda param: param.nbytes % _CACHE_LINE != 0)
        first = self.params[0]
        alignment = _ALIGNMENT // first.element_size()
        self._begins = [0]
        for param in self.params:
            self._begins.append(self._begins[-1] + -(-param.numel() // alignment) * alignment)
        size = self._begins[-1]
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self._create_grads()
        names = ["exp_avg", "exp_avg_sq", "ema_params"] + ["master_params"] * (dtype != first.dtype)
        self.states = {name: torch.zeros(size, dtype=dtype, device=first.device) for name in names}
        self.steps = torch.zeros(len(self.params), dtype=torch.int64, device=first.device)
        self.param_views = [self._view(self.weights, i) for i in range(len(self.params))]
        for param, view in zip(self.params, self.param_views, strict=True):
            view.copy_(param.detach())
        self._all_states = states
        self._adopt_states(param for param in self.params if has_state(states, param))
        self.counts = StepCounts([self.steps])
        # The runs if all parameters have gradients and the same step count.
        self._full_runs = self._runs([True] * len(self.params), [0] * len(self.params))
        self._has_own_grads = self._has_all_grads = False  # in this and in the last step
        # Runs that captured graphs update, and buffers that they write to and that were replaced since.
        self._captured_runs: list[slice] = []
        self._captured_grads: list[Tensor] = []
        self._has_params = False
        self._own_uses: dict[int, int] = {}  # of the storages of the views, without the parameters

    def replace_params(self) -> None:
        """Make the parameters views of their buffer; called after all allocations have succeeded."""
        self._own_uses = {storage_of(view): storage_uses(view) for view in self.param_views}
        # In C code, which no signal handler can interrupt.
        deque(map(setattr, self.params, repeat("data"), self.param_views), maxlen=0)
        self._remember_states()
        self._locations = list(map(_location, self.params))
        self._strides = list(map(Tensor.stride, self.params))
        self._has_params = True

    def own_uses(self) -> dict[int, int]:
        """Return how many tensors have the storage of each view, without those of the caller, by its address."""
        params = Counter(map(storage_of, self.params))
        return {storage: uses + params[storage] for storage, uses in self._own_uses.items()}

    def _create_grads(self) -> None:
        self.grads = torch.zeros_like(self.weights)
        self._grad_views = [self._view(self.grads, i) for i in range(len(self.params))]
        self._grad_layouts = self._layouts_of_grads()
        self._uses_of_a_grad_view = storage_uses(self._grad_views[0])

    def _layouts_of_grads(self) -> list[object]:
        """Return where the data of the views is, which ``param.grad.data = ...`` and ``share_memory_()`` change."""
        return [*map(Tensor.data_ptr, self._grad_views), *map(Tensor.stride, self._grad_views)]

    def _view(self, buffer: Tensor, i: int) -> Tensor:
        """Return a view of a parameter's part of a buffer, in the parameter's shape."""
        param = self.params[i]
        # A separate storage over the same memory: pickling then excludes the rest of the buffer, and safetensors and
        # accelerate do not take the parameters for tied ones.
        # torch_npu, which may be imported after this module, replaces the function.
        part = dlpack.from_dlpack(buffer[self._begins[i] : self._begins[i] + param.numel()])
        return part.as_strided(param.shape, param.stride())

    def _adopt_states(self, params: Iterable[Tensor]) -> None:
        """Move the states of parameters into the buffers."""
        places = {param: i for i, param in enumerate(self.params)}
        for param in params:
            i, state = places[param], self._all_states[param]
            init_missing_state(state, param, self.states["exp_avg"].dtype)
            views = {name: self._view(buffer, i) for name, buffer in self.states.items()}
            # On a device, writes are found by the version counter, which a separate storage does not share.
            step = dlpack.from_dlpack(self.steps[i]) if self.steps.is_cpu else self.steps[i]
            for name, view in {**views, "step": step}.items():
                state[name] = view.copy_(state[name])
        self._remember_states()

    def _remember_states(self) -> None:
        self._cached = CachedState(self.params, self._all_states)
        self._addresses = self._cached.addresses()

    def is_current(self, states: MutableMapping[Tensor, Any], have_moved: bool) -> bool:
        """Return whether parameters (checked only if ``have_moved``) and states are still views of the buffers."""
        if not self._has_params or (have_moved and list(map(_location, self.params)) != self._locations):
            return False
        if list(map(Tensor.stride, self.params)) != self._strides:  # p.data = p.data.t() does not move a parameter
            return False
        # state.data = ... leaves the buffers.
        return self._cached.is_current(self.params, states) and self._cached.addresses() == self._addresses

    def has_own_grads(self) -> bool:
        """Return whether all gradients are already views of their buffer; :meth:`gather` uses this, too."""
        are_views = all(map(is_, map(_grad_of, self.params), self._grad_views))
        self._has_own_grads = are_views and self._are_views_in_buffer()
        return self._has_own_grads

    def _are_views_in_buffer(self) -> bool:
        return self._layouts_of_grads() == self._grad_layouts

    def gather(self, captures: Captures) -> list[Run]:
        """Copy new gradients into their buffer, and return the runs to update."""
        self.counts.read()
        if new := self._cached.new_params():
            captures.before_new_states()
            self.counts.forget()
            self._adopt_states(new)
            self.counts.read()
        grads = list(map(_grad_of, self.params))
        has_own_grads, self._has_own_grads = self._has_own_grads, False  # it holds for this step only
        if not has_own_grads and (not self._are_views_in_buffer() or self._are_grads_held(grads)):
            if captures.has_captured:
                self._captured_grads.append(self.grads)  # which replays write
            self._create_grads()  # the caller keeps gradients of an earlier step, or replaced their data
            self._full_runs = self._runs([True] * len(grads), [0] * len(grads))
        has_grad = [True] * len(grads) if has_own_grads else [grad is not None for grad in grads]
        self._has_all_grads = all(has_grad)
        self._check_captured_runs(has_grad)
        if has_own_grads and len(set(self.counts.values)) == 1:
            runs = self._full_runs
        else:
            runs = self._runs(has_grad, self.counts.values)
            for run in runs:
                self._gather_run(run)
        if captures.has_captured and captures.is_capturing():
            self._captured_runs += [run.members for run in runs]
        if self._cached.are_params_modified():
            sync_master_from_param(self.states["master_params"], self.weights)
        return runs

    def _are_grads_held(self, grads: list[Tensor | None]) -> bool:
        """Return whether anyone else holds views of the buffer that are no longer gradients, or aliases of them."""
        unused = [view for grad, view in zip(grads, self._grad_views, strict=True) if grad is not view]
        if any(references != _references_in_two_lists() for references in _references(unused)):
            return True
        return any(storage_uses(view) > self._uses_of_a_grad_view for view in unused)

    def _check_captured_runs(self, has_grad: list[bool]) -> None:
        """Raise if replays would update a parameter with the step count of another one that differs."""
        for members in self._captured_runs:
            if len(set(has_grad[members])) > 1:
                raise RuntimeError(
                    "FusedEmaAdam.step: with flatten=True, a captured graph updates parameters with one step count, so"
                    " that in later steps all of them must have a gradient or none, but"
                    f" {sum(has_grad[members])} of {len(has_grad[members])} have one; capture the graph with"
                    " flatten=False"
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
        return Run(members, masters, grads, *moments, states["ema_params"], self.steps[members], weights)

    def _gather_run(self, run: Run) -> None:
        params, views = self.params[run.members], self._grad_views[run.members]
        grads: list[Tensor] = [param.grad for param in params]  # type: ignore[misc]
        alone = [references == _references_of_a_gradient() for references in _references(grads)]
        fresh = [one for one in zip(params, grads, views, strict=True) if one[1] is not one[2]]
        if len(fresh) == len(params) and all(grad.stride() == param.stride() for param, grad, _ in fresh):
            self._concatenate(run, grads)
        elif fresh:
            foreach_copy_([view for *_, view in fresh], [grad for _, grad, _ in fresh])
        for param, grad, view, is_alone in zip(params, grads, views, alone, strict=True):
            # A gradient that the caller holds and may fill again, or that is a view of another tensor, such as a
            # DistributedDataParallel bucket, is not replaced.
            if not is_alone or grad is view or grad.untyped_storage().nbytes() != grad.nbytes:
                continue
            if not has_alias(grad):
                param.grad = view

    def _concatenate(self, run: Run, grads: list[Tensor]) -> None:
        """Copy the gradients of a full run with a single launch."""
        parts: list[Tensor] = []
        end = self._begins[run.members.start]
        for begin, grad in zip(self._begins[run.members], grads, strict=True):
            if begin > end:
                parts.append(grad.new_zeros(begin - end))
            parts.append(grad.as_strided((grad.numel(),), (1,)))
            end = begin + grad.numel()
        torch.cat(parts, out=run.grads)

    def without_grad(self) -> ParamsWithoutGrad:
        """Return the parameters without a gradient that have a state."""
        if self._has_all_grads:
            return ParamsWithoutGrad([], [], [])
        is_ema_updated = [param.grad is None and has_state(self._all_states, param) for param in self.params]
        runs = self._runs(is_ema_updated, [0] * len(self.params))
        return ParamsWithoutGrad(
            [run.masters for run in runs], [run.ema_params for run in runs], [run.steps for run in runs]
        )

    def begin(self, runs: list[Run]) -> None:
        """Increment the version counters of the parameters, even if the step fails."""
        self.counts.forget()
        for run in runs:
            torch.autograd.graph.increment_version(self.params[run.members])

    def finish(self, runs: list[Run]) -> None:
        """Record a completed step."""
        self.counts.record(i for run in runs for i in range(run.members.start, run.members.stop))
        self._cached.record_versions()


def _location(param: Tensor) -> object:
    return param.data_ptr(), param.shape, param.stride(), param.dtype


def _references(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


@cache
def _references_in_two_lists() -> int:
    with torch.inference_mode(False):
        tensors = [torch.zeros((), device="cpu")]
    return _references(list(tensors))[0]


@cache
def _references_of_a_gradient() -> int:
    """Return what ``_references`` counts for a gradient in two lists that nobody else holds."""
    with torch.inference_mode(False):
        param = torch.zeros((), device="cpu", requires_grad=True)
        param.grad = torch.zeros((), device="cpu")
    grads = [param.grad]
    return _references(list(grads))[0]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
