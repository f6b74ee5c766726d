"""Flattened parameters: weights, gradients and states of many parameters in one buffer each."""

from collections import Counter, defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch_aclnn_ops._torch_compat import foreach_copy_, version_of
from torch_aclnn_ops.functional._ema_adam_implementations import TensorLists, is_dense
from torch_aclnn_ops.optim._states import complete, dtype_of_states, take_over_writes

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

_ALIGNMENT = 512  # bytes between the starts of parameters, as an NPU's allocator has it
_CACHE_LINE = 64  # bytes that torch's CPU kernels take at a time; only a rest goes through scalar code


class Run(NamedTuple):
    """Neighbours in a buffer that are updated together: they have gradients, and have done as many steps."""

    first: int
    last: int
    begin: int
    end: int


class FlatBuffer:
    """The buffers of the parameters of one group, dtype and device.

    Parameters, gradients and states become views of the buffers, so everybody else can go on using them. Views on the
    CPU have storages of their own over the same memory: to pickle one does not pickle the buffer.

    Args:
        params: the parameters; ``can_flatten`` must have accepted them.
        dtype: the dtype of the states.
        states: the optimizer's states; those of the parameters move into the buffers.
    """

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype, states: MutableMapping[Tensor, Any]) -> None:
        # Those that torch's CPU kernels end in scalar code come last, where they do not cut the others' run.
        self.params = sorted(params, key=lambda param: param.nbytes % _CACHE_LINE != 0)
        self.dtype = dtype
        self._all_states = states
        first = self.params[0]
        alignment = _ALIGNMENT // first.element_size()
        self._begins = [0]
        for param in self.params:
            self._begins.append(self._begins[-1] + -(-param.numel() // alignment) * alignment)
        size = self._begins[-1]
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.weights)
        names = ["exp_avg", "exp_avg_sq", "ema_params"]
        self.has_masters = dtype != first.dtype
        if self.has_masters:
            names.append("master_params")
        self.states = {name: torch.zeros(size, dtype=dtype, device=first.device) for name in names}
        self.steps = torch.zeros(len(self.params), dtype=torch.int64, device=first.device)
        self._step_views = list(self.steps.unbind())
        self._grad_views = self._views(self.grads)
        self._state_views = {name: self._views(buffer) for name, buffer in self.states.items()}
        for param, view in zip(self.params, self._views(self.weights), strict=True):
            view.copy_(param.detach())
            param.data = view
        self._pointers = [param.data_ptr() for param in self.params]
        self._adopted: list[dict[str, Any] | None] = [None] * len(self.params)
        self.warns = False
        for i, param in enumerate(self.params):
            if "step" in states.get(param, {}):
                self._adopt_state(i)
        self._take_stock()
        self._all_runs = list(self._runs([True] * len(self.params), ignores_counts=True))
        self.is_exact = True  # whether the counts are those of the device, which alone knows of skipped steps
        self._versions: list[int] = []

    def _views(self, buffer: Tensor) -> list[Tensor]:
        views = []
        for begin, param in zip(self._begins, self.params, strict=False):
            part = buffer[begin : begin + param.numel()]
            if buffer.is_cpu:
                part = from_dlpack(part)
            views.append(part.as_strided(param.shape, param.stride()))
        return views

    def _adopt_state(self, i: int) -> None:
        """Move the state of a parameter into the buffers."""
        state = self._all_states[self.params[i]]
        self.warns |= complete(state, self.params[i], self.dtype)
        for name, views in self._state_views.items():
            views[i].copy_(state[name])
            state[name] = views[i]
        self._step_views[i].copy_(state["step"])
        state["step"] = self._step_views[i]
        self._adopted[i] = state

    def _take_stock(self) -> None:
        self._adopted_views = {
            name: [view for view, adopted in zip(views, self._adopted, strict=True) if adopted is not None]
            for name, views in (("step", self._step_views), *self._state_views.items())
        }
        self._counts: list[int] = self.steps.tolist()
        self._note_counts()

    def _note_counts(self) -> None:
        self._steps_version = version_of(self.steps)
        self._is_uniform = None not in self._adopted and len(set(self._counts)) == 1

    def is_current(self, states: MutableMapping[Tensor, Any]) -> bool:
        """Return whether parameters and states are still the views that they were made."""
        if states is not self._all_states or list(map(Tensor.data_ptr, self.params)) != self._pointers:
            return False
        found = list(map(states.get, self.params))
        if not all(map(is_, found, self._adopted)):
            if any(
                state or adopted for state, adopted in zip(found, self._adopted, strict=True) if state is not adopted
            ):
                return False
        adopted = [state for state in self._adopted if state is not None]
        try:
            return all(
                all(map(is_, map(itemgetter(name), adopted), views)) for name, views in self._adopted_views.items()
            )
        except KeyError:
            return False

    def has_own_grads(self) -> bool:
        """Return whether all gradients are in their buffer already."""
        return all(map(is_, map(attrgetter("grad"), self.params), self._grad_views))

    def gather(self) -> list[Run]:
        """Bring new gradients into their buffer, and return what to update."""
        if version_of(self.steps) != self._steps_version:
            self._take_stock()
        if self._is_uniform and self.has_own_grads():
            runs = self._all_runs
        else:
            runs = self._gather_new()
        if self.has_masters and self._versions != list(map(version_of, self.params)):
            take_over_writes(self.states["master_params"], self.weights)
        return runs

    def _gather_new(self) -> list[Run]:
        grads = [param.grad for param in self.params]
        fresh = [grad is not None and grad is not view for grad, view in zip(grads, self._grad_views, strict=True)]
        new = [i for i, grad in enumerate(grads) if grad is not None and self._adopted[i] is None]
        for i in new:
            self._adopt_state(i)
        if new:
            self._take_stock()
        runs = list(self._runs([grad is not None for grad in grads]))
        for run in runs:
            self._gather_run(run, grads, fresh)
        return runs

    def _runs(self, has_grad: list[bool], ignores_counts: bool = False) -> Iterator[Run]:
        first = None
        for i, has in enumerate(has_grad):
            may_join = self._may_join(i) and (ignores_counts or self._counts[i] == self._counts[i - 1])
            if first is not None and not (has and may_join):
                yield Run(first, i - 1, self._begins[first], self._end(i - 1))
                first = None
            if has and first is None:
                first = i
        if first is not None:
            last = len(has_grad) - 1
            yield Run(first, last, self._begins[first], self._end(last))

    def _may_join(self, i: int) -> bool:
        # Scalar and vector code of the CPU's kernels round differently. Flattened or not shall make no difference, so
        # each tensor with a rest stays a tensor.
        return not self.weights.is_cpu or self.params[i].nbytes % _CACHE_LINE == 0

    def _end(self, i: int) -> int:
        return self._begins[i + 1] if self._may_join(i) else self._begins[i] + self.params[i].numel()

    def _gather_run(self, run: Run, grads: list[Tensor | None], fresh: list[bool]) -> None:
        members = [i for i in range(run.first, run.last + 1) if fresh[i]]
        if not members:
            return
        new = [grads[i] for i in members]
        strides = [self.params[i].stride() for i in members]
        is_whole = len(members) == run.last + 1 - run.first
        if is_whole and all(grad.stride() == stride for grad, stride in zip(new, strides, strict=True)):  # type: ignore[union-attr]
            self._concatenate(run, new)  # type: ignore[arg-type]
        else:
            foreach_copy_([self._grad_views[i] for i in members], new)  # type: ignore[arg-type]
        for i, grad in zip(members, new, strict=True):
            # A gradient that is a part of something, such as a bucket of DistributedDataParallel, stays where it is.
            if grad.untyped_storage().nbytes() == grad.nbytes:  # type: ignore[union-attr]
                self.params[i].grad = self._grad_views[i]

    def _concatenate(self, run: Run, grads: list[Tensor]) -> None:
        """Copy the gradients of a whole run by one launch."""
        parts = []
        for i, grad in zip(range(run.first, run.last + 1), grads, strict=True):
            size = grad.numel()
            parts.append(grad.as_strided((size,), (1,)))
            end = self._begins[i + 1] if i < run.last else run.end
            if gap := end - self._begins[i] - size:
                parts.append(grad.new_zeros(gap))
        torch.cat(parts, out=self.grads[run.begin : run.end])

    def lists(self, run: Run) -> TensorLists:
        """Return the tensors of a run as those of one long parameter."""
        part = slice(run.begin, run.end)
        states = {name: buffer[part] for name, buffer in self.states.items()}
        return TensorLists(
            [states["master_params"] if self.has_masters else self.weights[part]],
            [self.grads[part].to(self.dtype)],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [states["ema_params"]],
            [self.steps[run.first : run.last + 1]],
        )

    def count(self, run: Run) -> int:
        """Return how many steps the parameters of a run have done."""
        return self._counts[run.first]

    def finish(self, runs: list[Run]) -> None:
        """Count the step, and let autograd see that the parameters were written to."""
        for run in runs:
            part = slice(run.first, run.last + 1)
            self._counts[part] = [count + 1 for count in self._counts[part]]
            if self.has_masters:
                part = slice(run.begin, run.end)
                self.weights[part].copy_(self.states["master_params"][part])
            torch.autograd.graph.increment_version(self.params[run.first : run.last + 1])
        self._note_counts()
        if self.has_masters:
            self._versions = list(map(version_of, self.params))


class FlatGroup:
    """A parameter group as buffers, and the parameters that cannot be flattened.

    Args:
        group: the parameter group.
        states: the optimizer's states.
        previous: the buffers that the group had before.
    """

    def __init__(
        self, group: dict[str, Any], states: MutableMapping[Tensor, Any], previous: "FlatGroup | None" = None
    ) -> None:
        self.buffers: list[FlatBuffer] = []
        self._params = list(group["params"])
        own = {buffer.weights.untyped_storage().data_ptr() for buffer in previous.buffers} if previous else set()
        pointers = Counter(param.data_ptr() for param in self._params if type(param) in (Tensor, Parameter))
        buckets = defaultdict(list)
        self.rest: list[Tensor] = []
        for param in self._params:
            if can_flatten(param, own) and pointers[param.data_ptr()] == 1:
                buckets[param.dtype, param.device].append(param)
            else:
                self.rest.append(param)
        for params in buckets.values():
            dtype = dtype_of_states(params[0], group["master_weights"])
            self.buffers.append(FlatBuffer(params, dtype, states))

    def has_own_grads(self) -> bool:
        """Return whether all parameters are flattened, with gradients that are in their buffers."""
        return not self.rest and all(buffer.has_own_grads() for buffer in self.buffers)

    def is_current(self, group: dict[str, Any], states: MutableMapping[Tensor, Any]) -> bool:
        """Return whether the group still has the same parameters, and these their places."""
        params = group["params"]
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and all(buffer.is_current(states) for buffer in self.buffers)
        )


def can_flatten(param: Tensor, own_storages: set[int]) -> bool:
    """Return whether a parameter may move into a buffer.

    It may not if it shares its memory with another tensor, which would be left behind, or has none.
    """
    if type(param) not in (Tensor, Parameter) or param.numel() == 0 or param.layout != torch.strided:
        return False
    if not param.is_floating_point() or param.is_meta or not (param.requires_grad or param.grad is not None):
        return False
    storage = param.untyped_storage()
    is_alone = storage.nbytes() == param.nbytes or storage.data_ptr() in own_storages
    return is_alone and is_dense(param)
