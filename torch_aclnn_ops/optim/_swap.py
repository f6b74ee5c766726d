"""Parameters that hold their averages for a while, and get their weights back whatever happens."""

from contextlib import ContextDecorator, suppress
from functools import partial
from typing import Any, NamedTuple

from torch_aclnn_ops.ops.ema_adam.kernels import local
from torch_aclnn_ops.ops.ema_adam.step_progress import Call
from torch_aclnn_ops.optim._calls import MethodCall
from torch_aclnn_ops.optim._memory import check_memory
from torch_aclnn_ops.optim._sharding import FsdpUnits
from torch_aclnn_ops.optim._states import describe_params, states_of_params

import torch
from torch import Tensor


class Swap(ContextDecorator):
    """The context manager of ``swap_ema_params``.

    Args:
        optimizer: the optimizer, whose ``_exchange`` is what this has begun and not ended.
    """

    _exchange: "Exchange | None" = None
    _call: MethodCall | None = None

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        call = MethodCall("swap_ema_params")
        try:
            self._optimizer._begin(call)
            exchange = Exchange(self._optimizer)
            try:
                self._exchange = self._optimizer._exchange = exchange
                exchange.enter()
                self._call = call
            except BaseException:
                exchange.give_up()
                self._leave()
                raise
        except BaseException:
            self._optimizer._calls.pop(call, None)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        except KeyboardInterrupt:
            self._leave()
            raise
        finally:
            self._optimizer._calls.pop(self._call, None)

    def __del__(self) -> None:
        # An interrupt before the first bytecode of __exit__ leaves it to this.
        with suppress(Exception):
            self.__exit__()

    def _leave(self) -> None:
        if self._exchange is not None:
            self._exchange.leave()
            self._exchange = None


class Exchange:
    """The averages in the place of the weights, which are copied aside before anything is written."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, states = optimizer, optimizer.state
        self._fsdp_units = FsdpUnits(optimizer, f"{type(optimizer).__name__}.swap_ema_params")
        with torch.no_grad():
            self._fsdp_units.reshard()  # before a look at the parameters: FSDP1 makes them views of whole weights
        check_memory(optimizer.param_groups, states)
        self._owners = [param for param, state in states_of_params(states) if "ema_params" in state]
        self._params = [local(param) for param in self._owners]
        self._averages = [local(states[param]["ema_params"]) for param in self._owners]
        with torch.no_grad():
            self._weights = [param.clone() for param in self._params]
        self._pending: tuple[list[_Write], list[object]] = [], []
        self._kept: dict[Tensor, Exception] = {}  # which a device does not give their weights back, and why
        self.is_inside = True  # the parameters are to hold their averages

    @torch.no_grad()
    def enter(self) -> None:
        """Write the averages to the parameters."""
        for param, average in zip(self._params, self._averages, strict=True):
            param.copy_(average)
        self._fsdp_units.synchronize()

    def give_up(self) -> None:
        """Leave without a look at what the parameters hold."""
        self._pending = self._restoring(), []
        self.is_inside = False

    def leave(self) -> None:
        """Give the parameters their weights back; raise where a device refuses, after the others have theirs."""
        try:
            with torch.no_grad():
                self._fsdp_units.reshard()
        finally:
            errors, repeated = self._write()
        self._fsdp_units.synchronize()
        self._kept = {write.owner: error for write, error in errors if write.restores}
        method = f"{type(self._optimizer).__name__}.swap_ema_params"
        if self._kept:
            error = next(iter(self._kept.values()))
            raise RuntimeError(
                f"{method}: a device does not give parameters {describe_params(self._optimizer, self._kept)} their"
                " weights back: they hold their averages, and all others have their weights. The weights of these are"
                " kept on their device, and the next call of step(), state_dict() or swap_ema_params() writes them back"
                f" ({error})"
            ) from error
        if self._optimizer._exchange is self:  # not a later one
            self._optimizer._exchange = None
        if errors:
            not_averaged, error = [write.owner for write, _ in errors], errors[0][1]
            raise RuntimeError(
                f"{method}: all parameters have their weights back, but what was written to parameters"
                f" {describe_params(self._optimizer, not_averaged)} inside the with block is not in their averages"
                f" ({error})"
            ) from error
        if repeated:
            # What fails in a device's queue can end the queue, in which the second attempt is lost without a word.
            raise RuntimeError(
                f"{method}: a device failed while the parameters got their weights back. What had failed was done"
                f" again, and then raised nothing ({repeated[0]})"
            ) from repeated[0]

    @torch.no_grad()
    def _write(self) -> "tuple[list[tuple[_Write, Exception]], list[Exception]]":
        """Write what the parameters hold to their averages, and the weights to the parameters.

        Return what failed twice, and the failures of what raised nothing when it was done again.

        It can be repeated after any exception. Signals are handled between Python's bytecodes, so none comes between
        the calls that ``map`` makes, and the list of results says at any time which were made.
        """
        if self.is_inside:
            self._pending = (
                [write for pair in zip(self._averaging(), self._restoring(), strict=True) for write in pair],
                [],
            )
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
                if len(results) in failures:  # the second time: the others have their turn
                    results.append(error)
                else:
                    failures[len(results)] = error
        errors = [
            (write, result) for write, result in zip(writes, results, strict=True) if isinstance(result, Exception)
        ]
        return errors, [error for i, error in failures.items() if not isinstance(results[i], Exception)]

    def _averaging(self) -> "list[_Write]":
        return [
            _Write(owner, False, partial(Tensor.copy_ if average.dtype == param.dtype else _take_over, average, param))
            for owner, average, param in zip(self._owners, self._averages, self._params, strict=True)
        ]

    def _restoring(self) -> "list[_Write]":
        return [
            _Write(owner, True, partial(Tensor.copy_, param, weights))
            for owner, param, weights in zip(self._owners, self._params, self._weights, strict=True)
        ]


class _Write(NamedTuple):
    owner: Tensor
    restores: bool
    call: Call


def _take_over(average: Tensor, param: Tensor) -> None:
    """Write what a parameter of 16 bits holds to its average, which keeps its digits where that is what it holds."""
    param = param.to(average.device)  # trainers keep states on the host after training
    is_untouched = average.to(param.dtype) == param
    average.copy_(torch.where(is_untouched, average, param.to(average.dtype)))
