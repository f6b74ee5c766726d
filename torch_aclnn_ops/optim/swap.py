"""The context manager that swaps EMA weights into the parameters, and restores the weights in any event."""

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

from torch_aclnn_ops._tensors import is_plain, local
from torch_aclnn_ops._torch_compat.private import is_in_fsdp1_unit
from torch_aclnn_ops.optim.memory import check_memory
from torch_aclnn_ops.optim.sharded import FsdpUnits
from torch_aclnn_ops.optim.state import describe_params, dtype_of_states, init_missing_state, states_of_params

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_Function = TypeVar("_Function", bound=Callable[..., Any])


def check_outside_swap(optimizer: Any, method: str) -> None:
    """Raise if the parameters of an optimizer hold their EMA weights."""
    if optimizer._is_swapped:
        raise RuntimeError(
            f"{type(optimizer).__name__}.{method}: inside swap_ema_params() the parameters hold their EMA weights;"
            " leave the with block first"
        )


def outside_swap(method: _Function) -> _Function:
    """Decorate a method of an optimizer to raise inside a swap."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_outside_swap(self, method.__name__)
        return method(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


class _Entry(NamedTuple):
    param: Tensor
    weights: Tensor  # a copy
    ema_param: Tensor | None  # none before the first step
    storage: ReferenceType[torch.UntypedStorage]  # of the parameter, which a conversion replaces


class Swap(AbstractContextManager[None]):
    """The context manager returned by ``swap_ema_params``; the weights are copied aside before anything is written."""

    def __init__(self, optimizer: Any, model: nn.Module | None) -> None:
        self._optimizer, self._model = optimizer, model
        self._method = f"{type(optimizer).__name__}.swap_ema_params"
        self._is_inside = False

    @torch.no_grad()
    def __enter__(self) -> None:
        check_outside_swap(self._optimizer, "swap_ema_params")
        self._fsdp_units = FsdpUnits(self._optimizer, self._model, self._method)
        self._fsdp_units.reshard()  # before reading the parameters: FSDP1 makes them views of unsharded weights
        check_memory(self._optimizer.param_groups, self._optimizer.state)
        with torch.inference_mode(False), torch.no_grad():  # the weights may become the data of the parameters
            _start_missing_ema_params(self._optimizer)
            self._copy_weights()
            self._buffers = self._optimizer._ema_buffers.copies()
        try:
            self._is_inside = self._optimizer._is_swapped = True
            for buffer in self._buffers:
                buffer.write_average()
            for entry in self._entries:
                if entry.ema_param is not None:
                    local(entry.param).copy_(entry.ema_param)
            self._publish_writes()
        except BaseException:
            self._restore_weights()
            raise

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        if not self._is_inside:
            return
        try:
            self._fsdp_units.reshard()
            # In-place changes of the parameters are changes of their EMA weights.
            errors = _try_all({entry.param: partial(_keep_change, entry) for entry in self._entries})
        finally:
            self._restore_weights()
        if errors:
            error = next(iter(errors.values()))
            raise RuntimeError(
                f"{self._method}: the weights of all parameters are restored, but in-place changes of parameters"
                f" {describe_params(self._optimizer, errors)} inside the with block are not in their EMA weights"
                f" ({error})"
            ) from error

    def _copy_weights(self) -> None:
        states = self._optimizer.state
        params = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        others = [one for one in params if "ema_params" not in states.get(one, ()) and not is_lazy(one)]
        owners = [param for param, state in states_of_params(states) if "ema_params" in state]
        # Before the first step, the weights serve as EMA weights, but changes of them have no place.
        owners += [param for param in others if param.requires_grad and not param.is_meta]
        self._entries = [_entry(param, states.get(param, {}).get("ema_params")) for param in owners]
        # Frozen parameters without EMA weights, which the block may convert with the model.
        self._others = [(one, local(one).detach()) for one in others if one.is_meta or not one.requires_grad]

    def _restore_weights(self) -> None:
        """Write the weights to the parameters; if an interrupt prevents it, again."""
        writes: dict[Tensor, Callable[[], object]] = {
            param: partial(restore_dtype, param, weights) for param, weights in self._others
        }
        writes.update({entry.param: partial(_restore, entry.param, entry.weights) for entry in self._entries})
        writes.update({copied.values: copied.restore for copied in self._buffers})
        try:
            try:
                lost = _try_all(writes)
            except BaseException:
                _try_all(writes)
                raise
            names = self._names_of(lost)
            self._publish_writes()
        finally:
            self._entries, self._others, self._buffers = [], [], []
            self._is_inside = self._optimizer._is_swapped = False
        if lost:
            error = next(iter(lost.values()))
            raise RuntimeError(f"{self._method}: {names} could not be restored; load a checkpoint ({error})") from error

    def _names_of(self, tensors: Collection[Tensor]) -> str:
        params = describe_params(self._optimizer, tensors)
        names = [f"the weights of parameters {params}"] if params else []
        names += [f"buffer {copied.name!r}" for copied in self._buffers if copied.values in tensors]
        return ", ".join(names)

    def _publish_writes(self) -> None:
        """Drop casts of the previous values, and tell autograd and FSDP that shards were written."""
        torch.clear_autocast_cache()
        torch.autograd.graph.increment_version([entry.param for entry in self._entries if not is_plain(entry.param)])
        self._fsdp_units.synchronize()


def _entry(param: Tensor, ema_param: Tensor | None) -> _Entry:
    shard = local(param)
    return _Entry(param, shard.clone(), None if ema_param is None else local(ema_param), ref(shard.untyped_storage()))


def _try_all(writes: Mapping[Tensor, Callable[[], object]]) -> dict[Tensor, Exception]:
    """Make all writes; return the exceptions of those that failed."""
    errors: dict[Tensor, Exception] = {}
    for param, write in writes.items():
        try:
            write()
        except Exception as error:
            errors[param] = error
    return errors


def _start_missing_ema_params(optimizer: Any) -> None:
    """Let EMA weights start from the weights if a loaded state, such as that of AdamW, has none."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if "exp_avg" in state and "ema_params" not in state:
                init_missing_state(state, param, dtype_of_states(param, group["master_weights"]))


def _keep_change(entry: _Entry) -> None:
    """Copy elements of a parameter that were changed in place to its EMA weights; the others keep their precision."""
    param, ema_param = local(entry.param), entry.ema_param
    if param.untyped_storage() is not entry.storage():  # converted, possibly there and back
        return
    if ema_param is not None and ema_param.dtype == param.dtype:
        ema_param.copy_(param)
        return
    before = entry.weights if ema_param is None else ema_param
    is_changed = before.to(param.dtype) != param.to(before.device)  # trainers may move states to the host
    if ema_param is not None:
        ema_param.copy_(torch.where(is_changed, param.to(before.device, ema_param.dtype), before))
    elif (is_changed & ~(before.isnan() & param.to(before.device).isnan())).any():
        raise RuntimeError("which they do not have before their first step")


def _restore(param: Tensor, weights: Tensor) -> None:
    shard = local(param)
    if shard.dtype == weights.dtype:
        shard.copy_(weights)
    else:
        restore_dtype(param, weights)


def restore_dtype(param: Tensor, weights: Tensor) -> None:
    """Replace the data of a parameter that was converted to another dtype."""
    if param.dtype == weights.dtype:
        return
    if not is_plain(param) or is_in_fsdp1_unit(param):  # their shards have other references
        local(param).copy_(weights)
        raise RuntimeError(
            f"their dtype was changed from {weights.dtype} to {param.dtype} inside the with block, to which the weights"
            " are rounded; convert the model back inside the block"
        )
    with torch.inference_mode(False):
        param.data = weights.to(param.device)
