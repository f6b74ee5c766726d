"""``FusedEmaAdam``: Adam or AdamW with an exponential moving average of the weights (aclnnApplyFusedEmaAdam)."""

from collections.abc import Callable
from itertools import compress, repeat
from operator import is_
from typing import Any, NamedTuple, overload

from torch_aclnn_ops._call_log import log_detail
from torch_aclnn_ops._checks import check_bool, given_arguments
from torch_aclnn_ops._torch_compat.private import is_in_fsdp1_unit
from torch_aclnn_ops.ops import apply_fused_ema_adam_
from torch_aclnn_ops.ops.ema_adam import Options, TensorLists, empty_lists
from torch_aclnn_ops.ops.ema_adam.kernels import note_partial_update
from torch_aclnn_ops.optim import step as _steps
from torch_aclnn_ops.optim.ema_buffers import EmaBuffers, PreparedBuffers
from torch_aclnn_ops.optim.ema_params import EmaOptimizer
from torch_aclnn_ops.optim.flat import FlatBuffer, FlatGroup, Run
from torch_aclnn_ops.optim.memory import (
    check_formats,
    check_memory,
    check_no_shared_memory,
    check_no_shared_states,
    keep_once,
)
from torch_aclnn_ops.optim.options import EmaSchedule, check_group, options_of, without_lacking
from torch_aclnn_ops.optim.state import (
    CachedState,
    dtype_of_states,
    has_state,
    init_missing_state,
    sync_masters_from_params,
)
from torch_aclnn_ops.optim.swap import check_outside_swap, outside_swap

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT


class Work(NamedTuple):
    """What a step does for one parameter group: made for all groups before any of them is written."""

    tensors: TensorLists  # of the parameters that are not flattened
    without_grad: TensorLists  # of all parameters that have a state but no gradient
    steps: list[Tensor]  # the step counts of all parameters
    runs: list[tuple[FlatBuffer, list[Run]]]


class FusedEmaAdam(EmaOptimizer):
    r"""Adam, with L2 or decoupled weight decay, and an exponential moving average (EMA) of the weights, in one step.

    Like :class:`torch.optim.AdamW`, or :class:`torch.optim.Adam` without ``decoupled_weight_decay``, followed by the
    EMA :math:`s_t = \text{ema\_decay} \cdot s_{t-1} + (1 - \text{ema\_decay}) \, \theta_t` of the weights
    :math:`\theta`. The first step of a parameter with a gradient initializes ``step``, ``exp_avg``, ``exp_avg_sq``
    and ``ema_params``, a copy of the weights. The page of the operator has the formula, checkpoints and sharded
    parameters.

    Args:
        params: Parameters, (name, parameter) pairs, or dicts of parameter groups, each with any of the options below
            except ``flatten``, and keys of your own. Real floating point of 16, 32 or 64 bits (frozen ones of any
            dtype), of any shape, on any device.
        lr: Learning rate, finite and at least 0. A one-element tensor may be on the CPU or on the parameters' device;
            a step never synchronizes with it.
        betas: Decay of the moving averages of the gradient and of its square, each in [0, 1).
        eps: Term added to the denominator, outside the square root; finite and at least 0.
        weight_decay: Weight decay coefficient, finite and at least 0.
        ema_decay: Decay of the EMA of the weights, in [0, 1].
        decoupled_weight_decay: Use decoupled weight decay (AdamW) instead of L2 regularization (Adam).
        bias_correction: Divide the moments by :math:`1 - \beta^t`.
        maximize: Maximize the objective instead of minimizing it.
        ema_warmup: Warm-up of the decay to ``ema_decay`` with the number n of updates of the EMA: none (``None``),
            (1 + n) / (10 + n) (``"ratio"``), or 1 - (1 + n / gamma) ** -power (``"power"``).
        ema_warmup_gamma: gamma of ``"power"``, in updates; above 0.
        ema_warmup_power: power of ``"power"``; above 0.
        ema_start_step: Number of first steps in which the EMA weights equal the weights; at least 0. With 0 the EMA
            starts from the initial weights, with 1 it matches :class:`torch.optim.swa_utils.AveragedModel`.
        ema_update_every: Number of steps between updates of the EMA; at least 1.
        master_weights: Keep float32 weights and states for 16-bit parameters, instead of states of their dtype.
        ema_without_grad: Also update the EMA of parameters that have no gradient in a step. A schedule then uses the
            largest step count of the optimizer.
        flatten: Keep weights, gradients and states of a group in one buffer each, for one launch per buffer on an NPU.
            Parameters and gradients become views of it in the first step; what you assign later is copied in. Other
            tensors over the memory of a parameter do not follow it, nor does a captured backward pass without the step.
        ema_buffers: A module whose floating-point buffers are averaged, too, such as the model with its batch norm.
            Each step that updates the EMA of a parameter updates their averages with the same decay, starting from the
            buffers in the first one; 16-bit buffers have averages in float32. All groups must have the same options
            of the EMA.

    Raises:
        TypeError: ``params`` or an option has the wrong type, or an option is unknown or supported by torch only.
        ValueError: An option is out of range, or two parameters share memory.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = FusedEmaAdam(model.parameters(), lr=0.1, ema_decay=0.9)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 2)).square().mean().backward()
        ...     optimizer.step()
        >>> weight = model.weight.detach().clone()
        >>> with optimizer.swap_ema_params():
        ...     torch.equal(model.weight, weight)
        False

    Source:
        The CANN operator aclnnApplyFusedEmaAdam. Adam: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980.
        AdamW: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101. The warm-ups are those of TensorFlow's
        ``ExponentialMovingAverage(num_updates)`` and of timm's ``ModelEmaV3``.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler passes grad_scale and found_inf to step()
    _check_keys = staticmethod(check_group)

    @without_lacking
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        ema_decay: float = 0.9999,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        ema_warmup: str | None = None,
        ema_warmup_gamma: float = 1.0,
        ema_warmup_power: float = 2 / 3,
        ema_start_step: int = 0,
        ema_update_every: int = 1,
        master_weights: bool = True,
        ema_without_grad: bool = True,
        flatten: bool = False,
        ema_buffers: nn.Module | None = None,
    ) -> None:
        defaults = given_arguments(locals(), "params", "flatten", "ema_buffers")  # the options of a group
        options_of(defaults)
        check_bool("FusedEmaAdam", "flatten", flatten)
        if isinstance(params, (set, frozenset)):
            raise TypeError("FusedEmaAdam: params must be a list, not a set, whose order changes between runs")
        self._flatten = flatten
        self._ema_buffers = EmaBuffers(ema_buffers)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; missing options default to those of the constructor.

        Args:
            param_group: ``params``, any options except ``flatten``, and any keys of your own, which are kept.

        Raises:
            TypeError: An option has the wrong type or is one of torch's that this optimizer lacks.
            ValueError: An option is out of range, or a parameter is in another group, or shares memory.
        """
        if isinstance(param_group, dict):
            self._check_keys(param_group, self._flatten)
            options_of({**self.defaults, **param_group})
        super().add_param_group(param_group)  # it warns of a parameter that is listed twice
        keep_once(self.param_groups[-1])
        if any(map(is_in_fsdp1_unit, self.param_groups[-1]["params"])):
            # ShardedGradScaler agrees on infs with the other ranks only where it unscales the gradients itself.
            self._step_supports_amp_scaling = False
        try:
            check_no_shared_memory(self.param_groups)
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...
    @torch.no_grad()
    @outside_swap
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Update every parameter that has a gradient, and its EMA.

        All options and gradients are checked before any parameter is updated. With a :class:`torch.amp.GradScaler` the
        step unscales the gradients, and is skipped if the scaler has found infs or NaNs. On a device, a step that
        updates a parameter for the first time synchronizes with the scaler, so that a skipped step makes no state.

        If a step raises after its first write, for instance because a device fails or Ctrl-C is pressed, parameters may
        be partly updated. A note on the exception says so: load a checkpoint.

        Args:
            closure: Recomputes the loss and the gradients, and returns the loss.
            **kwargs: ``grad_scaler``, which ``torch_npu.npu.amp.GradScaler`` passes.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: A gradient is unsupported or does not match its parameter, the shapes of a parameter and its
                state, or of a buffer and its average, differ, or this is inside ``swap_ema_params`` or inference mode.
            TypeError: An option has the wrong type.
            ValueError: An option is out of range, or two parameters or states share memory.
        """
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and torch.is_inference_mode_enabled():
            raise RuntimeError(
                "FusedEmaAdam.step: must not be called in inference mode, whose states cannot be updated"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            check_outside_swap(self, "step")
        if is_compiling:
            self._step_in_compiled_code(kwargs)
        else:
            self._step_in_eager_mode(kwargs)
        return loss

    def _step_in_compiled_code(self, scaler: dict[str, Any]) -> None:
        """Trace a step: compiled code has no checks of memory and of new states, and does not know step counts."""
        parsed = [options_of(group) for group in self.param_groups]
        buffers = self._ema_buffers.prepare([schedule for _, schedule in parsed])
        _steps.check_gradients(self.param_groups, [])
        grad_scale, found_inf = _steps.grad_scaling(self, **scaler)
        if grad_scale is not None or found_inf is not None:
            parsed = [(one._replace(grad_scale=grad_scale, found_inf=found_inf), schedule) for one, schedule in parsed]
        self._captures.has_compiled, self._snapshot.is_valid = True, False
        self._write(self._prepare(parsed, True), parsed, buffers)

    def _step_in_eager_mode(self, scaler: dict[str, Any]) -> None:
        parsed = [self._checked_options[i].of(group) for i, group in enumerate(self.param_groups)]
        schedules = [schedule for _, schedule in parsed]
        buffers = self._ema_buffers.prepare(schedules)
        has_changed = not self._snapshot.is_current(self.param_groups, self.state)
        if has_changed:
            self._snapshot.is_valid = False  # until a step succeeds
            check_memory(self.param_groups, self.state)
            check_formats(self.param_groups, self.state, self._flatten)
        own = [i for i, one in self._flat_groups.items() if one.has_own_grads()]  # each group notes it for this step
        _steps.check_gradients(self.param_groups, [] if has_changed else own)
        grad_scale, found_inf = _steps.grad_scaling(self, **scaler)
        has_new = has_changed and _steps.are_states_missing(self)
        is_read = found_inf is not None and (found_inf.is_cpu or has_new)
        if is_read and found_inf:
            return
        if grad_scale is not None or found_inf is not None:
            parsed = [(one._replace(grad_scale=grad_scale, found_inf=found_inf), schedule) for one, schedule in parsed]
        self._captures.observe(self.param_groups, schedules, has_changed)
        if has_changed or self._ema_buffers.are_new(buffers):
            self._captures.before_new_states()
        work = self._prepare(parsed, has_changed)
        if not any(one.tensors.params or any(runs for _, runs in one.runs) for one in work):
            log_detail(apply_fused_ema_adam_.name, lambda: "not called, because no parameter has a gradient")
        try:
            self._write(work, parsed, buffers)
        except BaseException as error:
            note_partial_update(error)
            raise
        if has_changed:
            self._snapshot.remember(self.param_groups, self.state)

    def _prepare(self, parsed: list[tuple[Options, EmaSchedule]], has_changed: bool) -> list[Work]:
        """Make everything that the groups' updates need, before any of them is written."""
        all_work = []
        is_flattened = self._flatten and not torch.compiler.is_compiling()
        for i, (options, _) in enumerate(parsed):
            work = Work(empty_lists(), empty_lists(), [], [])
            all_work.append(work)
            if is_flattened and not self._prepare_flat(i, options, has_changed, work):
                continue
            # Also of the parameters without a gradient: steps, master weights, parameters.
            everything: tuple[list[Tensor], ...] = work.steps, [], []
            self._init_group(i, is_flattened, has_changed, *work.tensors, *work.without_grad, *everything)
            if torch.compiler.is_compiling():  # compiled code has no check whether parameters were modified
                sync_masters_from_params(*everything[1:])
        return all_work

    def _prepare_flat(self, i: int, options: Options, has_changed: bool, work: Work) -> list[Tensor]:
        """Gather the flattened parameters of a group; return the others."""
        group = self.param_groups[i]
        if has_changed:
            if i not in self._flat_groups or not self._flat_groups[i].fits(group):
                self._flat_groups[i] = FlatGroup(group)
            for buffer in self._flat_groups[i].buffers:
                buffer.take(self.state)
        for buffer in self._flat_groups[i].buffers:
            work.runs.append((buffer, buffer.gather(self._captures.is_capturing)))
            buffer.counts.are_exact &= self._captures.are_counts_known(options.found_inf)
            work.steps.append(buffer.steps)
            if group["ema_without_grad"]:
                for listed, from_buffer in zip(work.without_grad, buffer.without_grad(), strict=True):
                    listed += from_buffer
        return self._flat_groups[i].rest

    def _write(self, all_work: list[Work], parsed: list[tuple[Options, EmaSchedule]], buffers: PreparedBuffers) -> None:
        for i, (work, (options, schedule)) in enumerate(zip(all_work, parsed, strict=True)):
            for buffer, runs in work.runs:
                buffer.step(runs, options, schedule)
            if work.tensors.params and torch.compiler.is_compiling():
                _steps.step_lists(work.tensors, options, schedule)
            elif work.tensors.params:
                self._cached[i].counts.are_exact &= self._captures.are_counts_known(options.found_inf)
                _steps.step_cached(self._cached[i], work.tensors, options, schedule)
        steps = [step for work in all_work for step in work.steps]
        for work, (options, schedule) in zip(all_work, parsed, strict=True):
            if work.without_grad.ema_params:
                _steps.update_ema_params(work.without_grad, steps, options, schedule)
        moves_ema = any(work.tensors.params or work.without_grad.ema_params for work in all_work)
        if moves_ema or any(runs for work in all_work for _, runs in work.runs):
            self._ema_buffers.update(buffers, steps, *parsed[0])

    def _init_group(self, i: int, is_flattened: bool, has_changed: bool, *lists: list[Tensor]) -> None:
        """Fill both ``TensorLists`` of a ``Work``, and lists of all parameters that are not flattened.

        Dynamo calls optimizer methods of this name without tracing, and supports only numbers and lists as arguments.
        """
        group = self.param_groups[i]
        if has_changed:
            params = self._flat_groups[i].rest if is_flattened else group["params"]
            for param in params:
                if param.grad is not None or has_state(self.state, param):
                    init_missing_state(self.state[param], param, dtype_of_states(param, group["master_weights"]))
            if i == 0 or is_flattened:  # once for all groups; states of a buffer share nothing
                check_no_shared_states(self.param_groups, self.state)
            self._cached[i] = CachedState(params, self.state)
        cached = self._cached[i]
        if cached.versions.are_modified():
            sync_masters_from_params(cached.masters, cached.params)
        all_grads = [param.grad for param in cached.params]
        has_all = not any(map(is_, all_grads, repeat(None)))
        has_grad = [True] * len(all_grads) if has_all else [grad is not None for grad in all_grads]
        all_lists: tuple[list[Any], ...] = (cached.masters, all_grads, *cached.lists, cached.params)
        for listed, values in zip(lists[:7], all_lists, strict=True):
            listed += values if has_all else compress(values, has_grad)
        if group["ema_without_grad"] and not has_all:
            is_ema_updated = [not has for has in has_grad]
            needed: tuple[list[Tensor], ...] = (cached.masters, [], [], [], *cached.lists[2:], [])
            for listed, values in zip(lists[7:14], needed, strict=True):
                listed += compress(values, is_ema_updated)
        for listed, values in zip(lists[14:], (cached.lists[3], cached.masters, cached.params), strict=True):
            listed += values
