"""Access to EMA weights: swapped into the model, in a state dict, or in a file; and checkpoint methods."""

import os
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

from torch_aclnn_ops._checks import check_bool, describe
from torch_aclnn_ops._tensors import local
from torch_aclnn_ops._torch_compat.private import load_state_dict_hooks
from torch_aclnn_ops.optim import checkpoints
from torch_aclnn_ops.optim.ema_buffers import EmaBuffers
from torch_aclnn_ops.optim.flat import FlatGroup
from torch_aclnn_ops.optim.memory import Snapshot, check_memory
from torch_aclnn_ops.optim.options import CheckedOptions
from torch_aclnn_ops.optim.sharded import ShardedModel
from torch_aclnn_ops.optim.state import (
    CachedState,
    dtype_of_states,
    normalize_state,
    states_of_params,
    sync_master_from_param,
    warn_of_missing_ema_params,
)
from torch_aclnn_ops.optim.step import Captures
from torch_aclnn_ops.optim.swap import Swap, outside_swap

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

_BASE_OPTIONS = {"differentiable"}  # added to the defaults by torch's base class


class EmaOptimizer(Optimizer):
    """Base class of optimizers that keep the EMA weights of each parameter as ``ema_params`` in its state."""

    _flatten = False
    _ema_buffers = EmaBuffers(None)

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._set_up()
        super().__init__(params, defaults)
        self._export_steps_first()

    def _set_up(self) -> None:
        """Initialize attributes that are not part of a checkpoint."""
        # By group index: checked options, flat buffers, and the cached state of parameters that are not flattened.
        self._checked_options: dict[int, CheckedOptions] = defaultdict(CheckedOptions)
        self._flat_groups: dict[int, FlatGroup] = {}
        self._cached: dict[int, CachedState] = {}
        self._captures = Captures()
        self._is_swapped = False  # inside swap_ema_params
        self._snapshot = Snapshot()  # of the last successful step

    def swap_ema_params(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Swap the EMA weights into the parameters inside a ``with`` block.

        The block holds a copy of the weights, which needs as much memory as the parameters. On exit, the weights are
        restored bit for bit and in their dtype, even after an exception or an interrupt. In-place changes of the
        parameters inside the block are written to their EMA weights; what a conversion changes (``model.half()``) is
        not. Parameters that were never updated have no EMA weights: they keep their weights, and frozen ones keep what
        the block writes to them. With ``ema_buffers``, the buffers of that module are swapped, too, and changes by the
        block are undone. Without it, buffers are not swapped: if the model has batch norm, update them
        (:func:`torch.optim.swa_utils.update_bn`).

        With sharded parameters (``fully_shard`` or ``FullyShardedDataParallel``), every rank swaps its shards, and
        modules are resharded on entry and exit, so that the next forward pass gathers the current values. All ranks
        must enter and exit the block.

        Args:
            model: The model that is swapped. Only ``FullyShardedDataParallel`` needs it.

        Raises:
            RuntimeError: This is called inside another ``swap_ema_params`` of the same optimizer, or inside a forward
                or backward pass of FSDP; ``model`` lacks parameters of ``FullyShardedDataParallel`` that this optimizer
                has. On exit: the block changed parameters that have no EMA weights; it converted sharded parameters to
                another dtype, to which their weights are then rounded; or weights cannot be restored.
            TypeError: ``model`` is not a :class:`torch.nn.Module`.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> with optimizer.swap_ema_params():
            ...     prediction = model(torch.ones(1, 2))
        """
        if model is not None:
            _check_is_module("swap_ema_params", model)
        return Swap(self, model)

    @torch.no_grad()
    @outside_swap
    def ema_state_dict(self, model: nn.Module, *, full_state_dict: bool = False) -> dict[str, Any]:
        """Return the state dict of a model inside :meth:`swap_ema_params`, with EMA weights in place of its weights.

        Args:
            model: The model whose parameters are optimized. Buffers without averages, and parameters that were never
                updated, are copied unchanged. The keys are those of ``model.state_dict()``: for the result of
                :func:`torch.compile`, they begin with ``_orig_mod.``.
            full_state_dict: Gather sharded parameters, one at a time, to full tensors on the CPU of the first rank. All
                ranks must call this; the others get an empty dict. A no-op if nothing is sharded.

        Returns:
            Copies of the entries of ``model.state_dict()``, in the parameters' dtypes and on their devices: with
            ``fully_shard``, ``DTensor`` shards; with ``FullyShardedDataParallel``, full tensors on every rank, or what
            its ``state_dict_type`` says.

        Raises:
            RuntimeError: This is called inside ``swap_ema_params``.
            TypeError: ``model`` is not a :class:`torch.nn.Module`.
            ValueError: No parameter of the model is one of this optimizer's.

        Example:
            >>> model, ema_model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            >>> from torch_aclnn_ops.optim import FusedEmaAdam
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> ema_model.load_state_dict(optimizer.ema_state_dict(model))
            <All keys matched successfully>
        """
        _check_is_module("ema_state_dict", model)
        check_bool("ema_state_dict", "full_state_dict", full_state_dict)
        _, contents, failure = self._exported(model, full_state_dict)
        if failure is not None:
            raise failure
        return contents

    def _exported(self, model: nn.Module, is_full: bool) -> tuple[ShardedModel, dict[str, Any], Exception | None]:
        """Return :meth:`ema_state_dict`, and the exception of this rank, if any, after all ranks have gathered."""
        with self.swap_ema_params(model):
            own = {id(param) for group in self.param_groups for param in group["params"]}
            params = list(model.parameters())
            if params and not any(id(param) in own for param in params):
                raise ValueError(
                    f"FusedEmaAdam.ema_state_dict: model must have parameters of this optimizer, but none of its"
                    f" {len(params)} parameters is one of them; pass the model whose parameters are optimized"
                )
            sharded = ShardedModel(model)
            return sharded, *sharded.copied_state_dict(is_full)

    @torch.no_grad()
    @outside_swap
    def save_ema_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Save :meth:`ema_state_dict` to a file, for ``torch.load`` and ``load_state_dict``.

        The file is replaced atomically: a killed process leaves either the old or the new file. The target of a
        symbolic link is replaced, and device nodes and FIFOs are written to directly, as by :func:`torch.save`. The
        file has the full EMA weights of sharded parameters: all ranks must call this. The first one writes, and all
        return once the file is written, or raise.

        Args:
            model: The model whose parameters are optimized.
            path: The file, which may exist.

        Raises:
            RuntimeError: This is called inside ``swap_ema_params``.
            TypeError: ``model`` is not a :class:`torch.nn.Module`, or ``path`` is not a path.
            ValueError: No parameter of the model is one of this optimizer's.
            OSError: The file cannot be opened. A full disk is an error of ``torch.save``; an old file is kept.
        """
        _check_is_module("save_ema_model", model)
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"FusedEmaAdam.save_ema_model: path must be a str or an os.PathLike, but it is {describe(path)}"
            )
        sharded, contents, failure = self._exported(model, True)
        sharded.save_on_one_rank(contents, path, failure)

    @torch.no_grad()
    @outside_swap
    def reset_ema_params(self) -> None:
        """Reset all EMA weights to the current weights, and averages of buffers to the buffers, for instance if NaN.

        Step counts, and with them the position in the EMA schedule, are unchanged.

        Raises:
            RuntimeError: This is called inside ``swap_ema_params``.

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
        self._ema_buffers.reset()
        for param, state in states_of_params(self.state):
            if "ema_params" in state:
                # A parameter with a master weight may have been modified outside of the optimizer.
                master = state.get("master_params")
                if master is not None:
                    sync_master_from_param(local(master), local(param))
                local(state["ema_params"]).copy_(local(param if master is None else master))

    @outside_swap
    def state_dict(self) -> dict[str, Any]:
        """Return options and state like :meth:`torch.optim.Optimizer.state_dict`; raises inside ``swap_ema_params``.

        The result does not depend on ``flatten``. Averages of buffers are in ``ema_buffers``, by name. A ``step`` is a
        float64 tensor on the CPU, which is exact up to ``2**53`` and compatible with PyTorch's optimizers, whose own
        float32 steps are exact up to ``2**24``.
        """
        contents = super().state_dict()
        has_buffers = self._ema_buffers.module is not None
        return {**contents, "ema_buffers": dict(self._ema_buffers.averages)} if has_buffers else contents

    @outside_swap
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and state like :meth:`torch.optim.Optimizer.load_state_dict`; raises inside ``swap_ema_params``.

        Also accepts the state of :class:`torch.optim.AdamW`, :class:`torch.optim.Adam` and MindSpeed's
        ``FusedEmaAdamW``, and of flattened parameters. Missing options are unchanged. States of 16-bit parameters stay
        in float32. If ``ema_params`` is missing, or was loaded and saved by torch's optimizer, which does not update
        it, the EMA starts from the weights at the next step, with a warning. Another warning is emitted if averages of
        buffers are missing, which the functions of ``torch.distributed.checkpoint`` omit. Unknown entries are kept. If
        both sides have ``param_names``, a state belongs to the parameter of that name; else the order decides. As in
        PyTorch, tensors with the right dtype and device are not copied. If steps were captured, a warning says to
        capture them again: replays would go on with the earlier states.

        The load is atomic: after an exception or Ctrl-C the optimizer has its previous options and state, or all of the
        new ones.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Raises:
            TypeError: ``state_dict`` is not a dict.
            ValueError: The state is of an optimizer with ``amsgrad``, does not match the parameters, or has a value of
                the wrong type or out of range.
        """
        pre_hooks, post_hooks = load_state_dict_hooks(self)
        state_dict = checkpoints.shallow_copy(state_dict)
        for pre_hook in pre_hooks:
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        with torch.inference_mode(False), torch.no_grad():  # a step cannot write to tensors of inference mode
            buffers = self._ema_buffers.loaded(state_dict.get("ema_buffers", {}))
            loaded = checkpoints.convert(state_dict, self.param_groups, self.defaults.keys() - _BASE_OPTIONS)
            self.__setstate__({**loaded, "_ema_buffers": buffers})
        warn_of_missing_ema_params(self)
        buffers.warn_of_missing(self.state)
        self._captures.warn_of_new_states(stacklevel=4)
        for post_hook in post_hooks:
            post_hook(self)

    @outside_swap
    def __getstate__(self) -> dict[str, Any]:
        states = self.state.copy()
        for param, state in states_of_params(self.state):
            step = state.get("step")
            if isinstance(step, Tensor) and step.untyped_storage().nbytes() > step.nbytes:  # of all parameters
                states[param] = {**state, "step": step.clone()}
        return {**super().__getstate__(), "state": states, "_flatten": self._flatten, "_ema_buffers": self._ema_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_new = "_cached" not in self.__dict__
        if is_new:
            self._set_up()
        defaults = state["defaults"] if is_new else self.defaults
        states = state["state"].copy()
        for group in state["param_groups"]:
            for name in defaults.keys() - _BASE_OPTIONS:
                group.setdefault(name, defaults[name])
            for param in group["params"]:
                if param in states:
                    dtype = dtype_of_states(param, group["master_weights"])
                    # A pickle may share its memory with another process.
                    states[param] = normalize_state(states[param], param, dtype, copies_step=not is_new)
        # A single call of the base class sets all of these attributes.
        super().__setstate__({**state, "state": states, "_cached": {}, "_snapshot": Snapshot()})
        if is_new:
            self._export_steps_first()

    def _export_steps_first(self) -> None:
        """Let ``state_dict()`` convert steps to PyTorch's format before it runs hooks of a program."""
        self.register_state_dict_post_hook(checkpoints.export_steps, prepend=True)


def _check_is_module(method: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"FusedEmaAdam.{method}: model must be a torch.nn.Module, but it is {describe(model)}")
