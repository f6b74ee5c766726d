"""The averages in the place of the weights: in the model itself, in a state dict, in a file."""

import os
import warnings
from collections import defaultdict
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any

from torch_aclnn_ops._files import replacing
from torch_aclnn_ops.functional.ema_adam_kernels import local
from torch_aclnn_ops.functional.step_progress import StepProgress
from torch_aclnn_ops.optim import _checkpoints
from torch_aclnn_ops.optim._calls import INSIDE_SWAP, MethodCall, begin, exclusive
from torch_aclnn_ops.optim._flat import FlatGroup
from torch_aclnn_ops.optim._memory import Placement, check_memory
from torch_aclnn_ops.optim._options import CheckedOptions
from torch_aclnn_ops.optim._states import CachedState, dtype_of_states, sync_master_from_param
from torch_aclnn_ops.optim._swap import Exchange, Swap

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class AveragingOptimizer(Optimizer):
    """An optimizer whose states have an average of their parameter, ``ema_params``: how to get it out and back in."""

    _flatten = False

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

    def swap_ema_params(self) -> AbstractContextManager[None]:
        """Let the parameters hold their averages inside a ``with`` block.

        The weights are kept aside meanwhile, which takes as much memory as the parameters. Afterwards the parameters
        have them back bit for bit, also after an exception or an interrupt, before or inside the block; what was
        written to the parameters inside the block is in their averages. Parameters that were never updated keep their
        weights, and buffers of the model stay as they are: statistics of a batch norm belong to the weights, so update
        them (:func:`torch.optim.swa_utils.update_bn`) if the model has some.

        Raises:
            RuntimeError: this is inside another ``swap_ema_params`` of the same optimizer, or during its ``step``. Or a
                device has refused to give some parameters their weights back: the others have theirs, and the weights
                of these are kept and written back by the next call of a method of the optimizer.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> with optimizer.swap_ema_params():
            ...     prediction = model(torch.ones(1, 2))
        """
        return Swap(self)

    @torch.no_grad()
    @exclusive
    def ema_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state of a model with the averages for its weights, to load into such a model.

        Args:
            model: the model whose parameters are optimized here. Its buffers, and parameters that were never updated,
                are copied as they are.

        Returns:
            What ``model.state_dict()`` has, as copies, in the parameters' dtypes and on their devices.

        Raises:
            RuntimeError: this is inside ``swap_ema_params``.

        Example:
            >>> model, ema_model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> ema_model.load_state_dict(optimizer.ema_state_dict(model))
            <All keys matched successfully>
        """
        check_memory(self.param_groups, self.state)
        contents = model.state_dict(keep_vars=True)
        copies: dict[int, Tensor] = {}  # of tied weights there is one
        for name, value in contents.items():
            if isinstance(value, Tensor):
                if id(value) not in copies:
                    average = self.state.get(value, {}).get("ema_params", value)
                    copies[id(value)] = average.detach().to(value.dtype, copy=True)
                contents[name] = copies[id(value)]
        return contents

    def save_ema_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write :meth:`ema_state_dict` to a file, for ``torch.load`` and ``load_state_dict``.

        The file is replaced at once, so that a program that is killed leaves the old file or the new one.

        Args:
            model: the model whose parameters are optimized here.
            path: the file, which may exist.

        Raises:
            RuntimeError: this is inside ``swap_ema_params``.
            OSError: the file cannot be written.
        """
        with replacing(path) as file:
            torch.save(self.ema_state_dict(model), file)

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
        for param, state in self.state.items():
            if "ema_params" in state:
                # Somebody may have written to a parameter that has a master weight.
                master = state.get("master_params")
                if master is not None:
                    sync_master_from_param(local(master), local(param))
                local(state["ema_params"]).copy_(local(param if master is None else master))

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return options and state as :meth:`torch.optim.Optimizer.state_dict` does; refused in ``swap_ema_params``.

        Whether parameters are flattened makes no difference, and ``step`` is a float32 tensor, as torch has it.
        """
        return _checkpoints.with_torchs_steps(super().state_dict())

    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state as :meth:`torch.optim.Optimizer.load_state_dict` does; refused in ``swap_ema_params``.

        The state may be one of :class:`torch.optim.AdamW`, :class:`torch.optim.Adam` or MindSpeed's ``FusedEmaAdamW``,
        of flattened parameters or not. Options that are missing stay as they are. States keep float32 where the
        parameter has 16 bits. Where ``ema_params`` is missing, the average starts from the weights at the next step,
        with a warning.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of an optimizer with ``amsgrad``, or does not fit the parameters.
        """
        # Registered now, it comes after the hooks of others, and sees what they made of the state.
        hook = self.register_load_state_dict_pre_hook(lambda _, state: _checkpoints.prepare(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    @exclusive
    def __getstate__(self) -> dict[str, Any]:
        contents = super().__getstate__()
        # The steps of flattened parameters are views: each would take the others along.
        states = {
            param: {**state, "step": state["step"].clone()} if "step" in state else state
            for param, state in self.state.items()
        }
        return {**contents, "state": type(self.state)(dict, states), "_flatten": self._flatten}

    def __setstate__(self, state: dict[str, Any]) -> None:
        previous_groups = self.__dict__.get("param_groups", [])
        if "_cached" not in self.__dict__:
            self._set_up()
        super().__setstate__(state)
        self._cached.clear()
        self._updated.clear()
        self._has_warned = False
        for group, previous in zip_longest(self.param_groups, previous_groups, fillvalue=self.defaults):
            for name in self.defaults.keys() - {"differentiable"}:  # which the base class adds here
                group.setdefault(name, previous[name])
            for param in group["params"]:
                if param in self.state:
                    dtype = dtype_of_states(param, group["master_weights"])
                    self.state[param] = _checkpoints.unpacked(self.state[param], param, dtype)

    def _warn(self, lacks_average: bool) -> None:
        if lacks_average and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "FusedEmaAdam: the loaded state has no 'ema_params' for parameters that were trained before, as a"
                " checkpoint of torch.optim.AdamW; their averages start from the weights",
                stacklevel=8,
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
        if self._progress.is_torn():
            with torch.no_grad():
                self._progress.finish()
