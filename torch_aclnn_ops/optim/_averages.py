"""The averages in the place of the weights: in the model itself, in a state dict, in a file."""

import os
import warnings
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch_aclnn_ops._torch_compat.optimizer import load_state_dict_hooks
from torch_aclnn_ops.ops.ema_adam.kernels import local
from torch_aclnn_ops.ops.ema_adam.step_progress import StepProgress
from torch_aclnn_ops.optim import _checkpoints
from torch_aclnn_ops.optim._calls import INSIDE_SWAP, MethodCall, begin, exclusive
from torch_aclnn_ops.optim._flat import FlatGroup
from torch_aclnn_ops.optim._memory import Placement, check_memory
from torch_aclnn_ops.optim._options import CheckedOptions
from torch_aclnn_ops.optim._sharding import Sharers, zero_that_makes_it
from torch_aclnn_ops.optim._states import (
    CachedState,
    dtype_of_states,
    normalised,
    states_of_params,
    sync_master_from_param,
)
from torch_aclnn_ops.optim._swap import Exchange, Swap

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

_OF_BASE = {"differentiable"}  # which torch's base class adds to the defaults


class AveragingOptimizer(Optimizer):
    """An optimizer whose states have an average of their parameter, ``ema_params``: how to get it out and back in."""

    _flatten = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._set_up()
        super().__init__(params, defaults)
        self._export_steps()

    def _set_up(self) -> None:
        """Make what no checkpoint has."""
        # Of each group, by its index: its options, its buffers, and the states of the parameters that are in none.
        self._checked_options: dict[int, CheckedOptions] = defaultdict(CheckedOptions)
        self._flat_groups: dict[int, FlatGroup] = {}
        self._cached: dict[int, CachedState] = {}
        self._has_warned = False
        self._progress = StepProgress()  # of the last step that failed
        self._updated: set[Tensor] = set()  # the parameters that failed steps since the last whole one have updated
        self._exchange: Exchange | None = None  # that is not undone
        self._placement = Placement()  # at the end of the last whole step
        self._calls: dict[MethodCall, None] = {}  # that run now, in the order in which they began
        self._in_closure = False
        self._is_part_of_zero = zero_that_makes_it() is not None

    def swap_ema_params(self) -> AbstractContextManager[None]:
        """Let the parameters hold their averages inside a ``with`` block.

        The weights are kept aside meanwhile, which takes as much memory as the parameters. Afterwards the parameters
        have them back bit for bit, also after an exception or an interrupt, before or inside the block; what was
        written to the parameters inside the block is in their averages. Parameters that were never updated keep their
        weights, and buffers of the model stay as they are: statistics of a batch norm belong to the weights, so update
        them (:func:`torch.optim.swa_utils.update_bn`) if the model has some.

        Where FSDP has sharded parameters (``fully_shard``, or ``FullyShardedDataParallel``), every rank swaps its
        shards, and modules are resharded at both ends of the block, so that the next forward pass gathers what they
        hold then. All ranks have to enter and leave the block.

        Raises:
            RuntimeError: this is inside another ``swap_ema_params`` of the same optimizer, or during its ``step``, or
                inside a forward or backward pass of FSDP, or the optimizer is a part of a ``ZeroRedundancyOptimizer``.
                Or a device has refused to give some parameters their weights back: the others have theirs, and the
                weights of these are kept and written back by the next call of a method of the optimizer.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> with optimizer.swap_ema_params():
            ...     prediction = model(torch.ones(1, 2))
        """
        self._check_not_part_of_zero("swap_ema_params")
        return Swap(self)

    @torch.no_grad()
    @exclusive
    def ema_state_dict(self, model: nn.Module, *, full_state_dict: bool = False) -> dict[str, Any]:
        """Return the state of a model with the averages for its weights, to load into such a model.

        Args:
            model: the model whose parameters are optimized here. Its buffers, and parameters that were never updated,
                are copied as they are.
            full_state_dict: gather sharded parameters, one after the other, to whole tensors on the CPU of the first
                rank. All ranks have to call this, and the others get an empty dict. It makes no difference where
                nothing is sharded.

        Returns:
            What ``model.state_dict()`` has, as copies, in the parameters' dtypes and on their devices: ``DTensor`` of
            this rank's shards after ``fully_shard``, to load into a model with the same shards; whole tensors on every
            rank with ``FullyShardedDataParallel`` unless its ``state_dict_type`` is another one.

        Raises:
            RuntimeError: this is inside ``swap_ema_params``, or the optimizer is a part of a
                ``ZeroRedundancyOptimizer``.

        Example:
            >>> model, ema_model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> ema_model.load_state_dict(optimizer.ema_state_dict(model))
            <All keys matched successfully>
        """
        contents, failure = self._averaged_state_dict(Sharers(model), full_state_dict)
        if failure is not None:
            raise failure
        return contents

    def _averaged_state_dict(self, sharers: Sharers, is_full: bool) -> tuple[dict[str, Any], Exception | None]:
        """Return :meth:`ema_state_dict`, and what has failed on this rank while all ranks gathered."""
        self._check_not_part_of_zero("ema_state_dict")
        if not sharers.has_fsdp1:  # whose parameters a swap checks when it has resharded them
            check_memory(self.param_groups, self.state)
        # The state dict of FSDP1 has copies of its parameters, for which the optimizer has no state.
        with self.swap_ema_params() if sharers.has_fsdp1 else nullcontext():
            if is_full and sharers.are_several:
                return sharers.gathered(self.state)
            contents = sharers.state_dict()
            copies: dict[int, Tensor] = {}  # of tied weights there is one
            for name, value in contents.items():
                if isinstance(value, Tensor):
                    if id(value) not in copies:
                        average = self.state.get(value, {}).get("ema_params", value)
                        copies[id(value)] = average.detach().to(value.dtype, copy=True)
                    contents[name] = copies[id(value)]
            return contents, None

    @torch.no_grad()
    @exclusive
    def save_ema_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write :meth:`ema_state_dict` to a file, for ``torch.load`` and ``load_state_dict``.

        The file is replaced at once, so that a program that is killed leaves the old file or the new one. A symbolic
        link stays, and its target is replaced; device nodes and FIFOs are written to, as :func:`torch.save` does. Of
        sharded parameters it has the whole averages, for a model on any number of ranks: all ranks call this, the first
        one writes, and all return when the file is there, or raise.

        Args:
            model: the model whose parameters are optimized here.
            path: the file, which may exist.

        Raises:
            RuntimeError: this is inside ``swap_ema_params``, or the optimizer is a part of a
                ``ZeroRedundancyOptimizer``.
            OSError: the file cannot be written, for instance because the disk is full; the old file stays.
        """
        sharers = Sharers(model)
        contents, failure = self._averaged_state_dict(sharers, True)
        sharers.write_once(contents, path, failure)

    @torch.no_grad()
    @exclusive
    def reset_ema_params(self) -> None:
        """Let all averages start again from the weights.

        Step counts stay as they are, and with them the place in a schedule of the average.

        Raises:
            RuntimeError: this is inside ``swap_ema_params``.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.reset_ema_params()
            >>> torch.equal(optimizer.state[model.weight]["ema_params"], model.weight)
            True
        """
        check_memory(self.param_groups, self.state)
        for param, state in states_of_params(self.state):
            if "ema_params" in state:
                # Somebody may have written to a parameter that has a master weight.
                master = state.get("master_params")
                if master is not None:
                    sync_master_from_param(local(master), local(param))
                local(state["ema_params"]).copy_(local(param if master is None else master))

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return options and state as :meth:`torch.optim.Optimizer.state_dict` does; refused in ``swap_ema_params``.

        Whether parameters are flattened makes no difference. A ``step`` is a float64 tensor on the CPU, which is exact
        up to 2**53 and which torch's optimizers take as they do the float32 tensors of their own, exact up to 2**24:
        torch writes float64 itself where that is the default dtype.
        """
        return super().state_dict()

    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state as :meth:`torch.optim.Optimizer.load_state_dict` does; refused in ``swap_ema_params``.

        The state may be one of :class:`torch.optim.AdamW`, :class:`torch.optim.Adam` or MindSpeed's ``FusedEmaAdamW``,
        of flattened parameters or not. Options that are missing stay as they are. States keep float32 where the
        parameter has 16 bits. Where ``ema_params`` is missing, the average starts from the weights at the next step,
        with a warning. Other entries are taken as they are. As in torch, a tensor that has the right dtype and device
        is not copied.

        Everything is checked before anything is changed: after an exception, or Ctrl-C, the optimizer has its previous
        options and state, or all of the new ones.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: a part of the state has another type.
            ValueError: the state is of an optimizer with ``amsgrad``, does not fit the parameters, or a value is out of
                range.
        """
        pre_hooks, post_hooks = load_state_dict_hooks(self)
        state_dict = _checkpoints.copied(state_dict)
        for pre_hook in pre_hooks:
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        self.__setstate__(_checkpoints.checked(state_dict, self.param_groups, self.defaults.keys() - _OF_BASE))
        for post_hook in post_hooks:
            post_hook(self)

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        contents = super().__getstate__()
        # The steps of flattened parameters are views: each would take the others along.
        states = self.state.copy()
        for param, state in states_of_params(self.state):
            if isinstance(state.get("step"), Tensor):
                states[param] = {**state, "step": state["step"].clone()}
        return {**contents, "state": states, "_flatten": self._flatten}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_new = "_cached" not in self.__dict__
        if is_new:
            self._set_up()
        defaults = state["defaults"] if is_new else self.defaults
        states = state["state"].copy()
        for group in state["param_groups"]:
            for name in defaults.keys() - _OF_BASE:
                group.setdefault(name, defaults[name])
            for param in group["params"]:
                if param in states:
                    states[param] = normalised(states[param], param, dtype_of_states(param, group["master_weights"]))
        # The base class puts all of these in their places by one call.
        made_anew = {"_cached": {}, "_updated": set(), "_has_warned": False}
        super().__setstate__({**state, "state": states, **made_anew})
        if is_new:
            self._export_steps()

    def _export_steps(self) -> None:
        """Let what :meth:`state_dict` returns have torch's kind of steps, also for hooks of others."""
        self.register_state_dict_post_hook(_checkpoints.export_steps, prepend=True)

    def _warn(self, lacks_average: bool) -> None:
        if lacks_average and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "FusedEmaAdam: the loaded state has no 'ema_params' for parameters that were trained before, as a"
                " checkpoint of torch.optim.AdamW; their averages start from the weights",
                stacklevel=8,
            )

    def _check_not_part_of_zero(self, method: str) -> None:
        if self._is_part_of_zero:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: inside of a ZeroRedundancyOptimizer this rank has the averages of its"
                " own parameters only; after consolidate_state_dict() the state_dict() of the ZeroRedundancyOptimizer"
                " has all of them, each in the 'ema_params' of its parameter"
            )

    def _begin(self, call: MethodCall) -> None:
        """Let a call begin that meets no other."""
        begin(self._calls, call, self._in_closure, type(self).__name__)
        self._make_whole(call.method)

    def _make_whole(self, method: str) -> None:
        """Finish what a failure has left half done; raise inside ``swap_ema_params``."""
        if self._exchange is not None:
            if self._exchange.is_inside:
                raise RuntimeError(f"{type(self).__name__}.{method}: {INSIDE_SWAP}")
            self._exchange.leave()
        if self._progress.is_incomplete():
            with torch.no_grad():
                self._progress.finish()
