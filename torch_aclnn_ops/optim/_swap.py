"""The context manager that swaps EMA weights into the parameters, and restores the weights in any event."""

import inspect
from collections.abc import Callable
from contextlib import ContextDecorator, suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from torch_aclnn_ops._numerics import HALF_DTYPES, half_dtypes
from torch_aclnn_ops._torch_compat.fsdp import is_in_fsdp1_unit
from torch_aclnn_ops.ops.ema_adam.kernels import is_plain, local
from torch_aclnn_ops.optim._calls import MethodCall
from torch_aclnn_ops.optim._memory import check_memory
from torch_aclnn_ops.optim._sharding import FsdpUnits
from torch_aclnn_ops.optim._states import describe_params, dtype_of_states, init_missing_state, states_of_params

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Call = partial[Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_RUN_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


class Swap(ContextDecorator):
    """The context manager returned by ``swap_ema_params``.

    Args:
        optimizer: The optimizer; its ``_exchange`` is set while a swap is active or incomplete.
        model: The model, which is needed only for FSDP1.
    """

    _exchange: "Exchange | None" = None
    _call: MethodCall | None = None

    def __init__(self, optimizer: Any, model: nn.Module | None) -> None:
        self._optimizer, self._model = optimizer, model

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function; the body of a generator or coroutine would run after the swap."""
        if any(is_one(function) for is_one in _RUN_LATER):
            raise TypeError(
                "swap_ema_params: only functions that return their result can be decorated, but"
                f" {function.__qualname__} is a generator or a coroutine; use a with block inside it"
            )
        return super().__call__(function)

    def __enter__(self) -> None:
        call = MethodCall("swap_ema_params")
        try:
            self._optimizer._begin(call)
            exchange = Exchange(self._optimizer, self._model)
            try:
                self._exchange = self._optimizer._exchange = exchange
                exchange.enter()
                self._call = call
            except BaseException:
                exchange.abort()
                self._leave()
                raise
        except BaseException:
            self._optimizer._calls.pop(call, None)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        except KeyboardInterrupt:
            self._leave()  # restore what the interrupt left
            raise
        finally:
            self._optimizer._calls.pop(self._call, None)

    def __del__(self) -> None:
        # Needed if an interrupt arrives before the first bytecode of __exit__.
        with suppress(Exception):
            self.__exit__()

    def _leave(self) -> None:
        if self._exchange is not None:
            self._exchange.leave()
            self._exchange = None


class Exchange:
    """An exchange of weights and averages; the weights are copied aside before anything is written."""

    def __init__(self, optimizer: Any, model: nn.Module | None) -> None:
        self._optimizer, states = optimizer, optimizer.state
        self._fsdp_units = FsdpUnits(optimizer, model, f"{type(optimizer).__name__}.swap_ema_params")
        with torch.no_grad():
            self._fsdp_units.reshard()  # before reading the parameters: FSDP1 makes them views of unsharded weights
        check_memory(optimizer.param_groups, states)
        with torch.inference_mode(False), torch.no_grad():  # the weights may become the data of the parameters
            _start_missing_averages(optimizer)
            params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
            others = [one for one in params if "ema_params" not in states.get(one, ()) and not is_lazy(one)]
            self._owners = [param for param, state in states_of_params(states) if "ema_params" in state]
            # Before the first step, the weights serve as averages, but changes of them have no place.
            self._owners += [param for param in others if param.requires_grad and not param.is_meta]
            self._weights = [local(param).clone() for param in self._owners]
        self._averages = [
            local(states[param]["ema_params"]) if "ema_params" in states.get(param, ()) else None
            for param in self._owners
        ]
        self._storages = [ref(local(param).untyped_storage()) for param in self._owners]
        # Frozen parameters without an average, which the block may convert with the model.
        self._others = [(one, local(one).detach()) for one in others if one.is_meta or not one.requires_grad]
        self._pending: tuple[list[_Write], list[object]] = [], []
        self._kept: dict[Tensor, Exception] = {}  # parameters whose weights could not be restored, and why
        self.is_inside = True  # whether the parameters should hold their averages

    @torch.no_grad()
    def enter(self) -> None:
        """Write the averages to the parameters."""
        for param, average in zip(self._owners, self._averages, strict=True):
            if average is not None:
                local(param).copy_(average)
        self._forget_weights()
        self._fsdp_units.synchronize()

    def _forget_weights(self) -> None:
        """Drop casts of the previous values, and tell autograd that DTensors changed, whose shards were written."""
        torch.clear_autocast_cache()
        torch.autograd.graph.increment_version([param for param in self._owners if not is_plain(param)])

    def abort(self) -> None:
        """Prepare to restore the weights without updating the averages."""
        self._pending = self._restoring(), []
        self.is_inside = False

    def leave(self) -> None:
        """Restore the weights of all parameters; raise afterwards if a device failed for some of them."""
        try:
            with torch.no_grad():
                self._fsdp_units.reshard()
        finally:
            errors, repeated = self._write()
        self._forget_weights()
        self._fsdp_units.synchronize()
        self._kept = {write.owner: error for write, error in errors if write.restores}
        method = f"{type(self._optimizer).__name__}.swap_ema_params"
        if self._kept:
            error = next(iter(self._kept.values()))
            raise RuntimeError(
                f"{method}: the weights of parameters {describe_params(self._optimizer, self._kept)} could not be"
                " restored: they hold their EMA weights, and all others have their weights. Their weights are kept on"
                " their device, and the next call of step(), state_dict() or swap_ema_params() restores them"
                f" ({error})"
            ) from error
        if self._optimizer._exchange is self:  # not a later one
            self._optimizer._exchange = None
        if errors:
            not_averaged, error = [write.owner for write, _ in errors], errors[0][1]
            raise RuntimeError(
                f"{method}: the weights of all parameters are restored, but in-place changes of parameters"
                f" {describe_params(self._optimizer, not_averaged)} inside the with block are not in their EMA weights"
                f" ({error})"
            ) from error
        if repeated:
            # A failure can stop a device's queue, which then silently drops the second attempt.
            raise RuntimeError(
                f"{method}: a device failed while the weights were restored. The failed writes were repeated without"
                f" an error ({repeated[0]})"
            ) from repeated[0]

    @torch.no_grad()
    def _write(self) -> "tuple[list[tuple[_Write, Exception]], list[Exception]]":
        """Copy the parameters to their averages, and the weights to the parameters.

        Returns the writes that failed twice, and the exceptions of writes that succeeded when they were repeated.

        It can be repeated after any exception. Python handles signals between bytecodes, so that no handler runs
        between the calls made by ``map``, and the length of the list of results is the number of calls made.
        """
        if self.is_inside:
            # Each weight after its average; the last ones belong to parameters without an average.
            pairs = zip_longest(self._averaging(), self._restoring())
            self._pending = [write for pair in pairs for write in pair if write is not None], []
            self.is_inside = False
        elif self._kept:
            self._pending = [write for write in self._restoring() if write.owner in self._kept], []
        writes, results = self._pending
        calls = [write.call for write in writes]
        failures: dict[int, Exception] = {}
        while len(results) < len(calls):
            try:
                results.extend(map(partial.__call__, calls[len(results) :]))
            except Exception as error:
                if len(results) in failures:  # the second failure: continue with the next write
                    results.append(error)
                else:
                    failures[len(results)] = error
        errors = [
            (write, result) for write, result in zip(writes, results, strict=True) if isinstance(result, Exception)
        ]
        return errors, [error for i, error in failures.items() if not isinstance(results[i], Exception)]

    def _averaging(self) -> "list[_Write]":
        writes = []
        lists = self._owners, self._averages, self._weights, self._storages
        for owner, average, weights, storage in zip(*lists, strict=True):
            param = local(owner)
            has_been_converted = param.untyped_storage() is not storage()  # possibly there and back
            if average is None:
                check = partial(_check_unchanged, weights, param, has_been_converted)
                writes.append(_Write(owner, False, check))
                continue
            call: Call = partial(Tensor.copy_, average, param)
            if has_been_converted or not average.dtype == param.dtype == weights.dtype:
                call = partial(_copy_changed, average, param, weights.dtype, has_been_converted)
            writes.append(_Write(owner, False, call))
        return writes

    def _restoring(self) -> "list[_Write]":
        """Return the writes that restore the weights."""
        writes = []
        for owner, weights in zip(self._owners, self._weights, strict=True):
            param = local(owner)
            call: Call = partial(Tensor.copy_, param, weights)
            if param.dtype != weights.dtype:
                call = partial(restore_dtype, owner, weights)
            writes.append(_Write(owner, True, call))
        converted = [(param, weights) for param, weights in self._others if param.dtype != weights.dtype]
        return writes + [_Write(param, True, partial(restore_dtype, param, weights)) for param, weights in converted]


def _start_missing_averages(optimizer: Any) -> None:
    """Let averages start from the weights if a loaded state, such as that of AdamW, has none."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if "exp_avg" in state and "ema_params" not in state:
                optimizer._warn(init_missing_state(state, param, dtype_of_states(param, group["master_weights"])))


class _Write(NamedTuple):
    owner: Tensor
    restores: bool
    call: Call


def _copy_changed(average: Tensor, param: Tensor, dtype: torch.dtype, has_been_converted: bool) -> None:
    """Copy changed elements of a parameter to its average; unchanged ones keep their precision."""
    device = _compared_on(average)
    param, before = param.to(device), average.to(device)  # trainers may move states to the host after training
    is_untouched = _is_untouched(before.to(dtype), param, has_been_converted)
    average.copy_(torch.where(is_untouched, before, param.to(average.dtype)))


def _compared_on(tensor: Tensor) -> torch.device:
    """Return where to compare, in all 16-bit dtypes: the host has those that a device lacks."""
    return tensor.device if half_dtypes(tensor.device.type) == HALF_DTYPES else torch.device("cpu")


def _is_untouched(given: Tensor, param: Tensor, has_been_converted: bool) -> Tensor:
    """Return which elements of a parameter are as given, or as a conversion to another dtype and back leaves them."""
    is_untouched = given.to(param.dtype) == param
    for other in HALF_DTYPES if has_been_converted else ():
        is_untouched |= given.to(other).to(param.dtype) == param
    return is_untouched


def _check_unchanged(weights: Tensor, param: Tensor, has_been_converted: bool) -> None:
    """Raise if a parameter that has no average yet was changed."""
    weights = weights.to(_compared_on(weights))
    is_untouched = _is_untouched(weights, param.to(weights.device), has_been_converted) | weights.isnan()
    if not is_untouched.all():
        raise RuntimeError("which they do not have before their first step")


def restore_dtype(param: Tensor, weights: Tensor) -> None:
    """Replace the data of a parameter that was converted to another dtype; it can be repeated after any exception."""
    if param.dtype == weights.dtype:
        return
    if not is_plain(param) or is_in_fsdp1_unit(param):  # their shards have other references
        raise RuntimeError(
            f"their dtype was changed from {weights.dtype} to {param.dtype} inside the with block; first convert the"
            " model back"
        )
    with torch.inference_mode(False):
        param.data = weights.to(param.device)
