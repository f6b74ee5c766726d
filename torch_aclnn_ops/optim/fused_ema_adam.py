"""``FusedEmaAdam``: Adam or AdamW that keeps an exponential moving average of the weights (aclnnApplyFusedEmaAdam)."""

from collections.abc import Callable
from itertools import compress
from typing import Any, overload

from torch_aclnn_ops._call_log import is_explaining
from torch_aclnn_ops.ops.ema_adam.kernels import Options, TensorLists, local
from torch_aclnn_ops.ops.ema_adam.step_progress import StepProgress
from torch_aclnn_ops.optim import _steps
from torch_aclnn_ops.optim._averages import AveragingOptimizer
from torch_aclnn_ops.optim._calls import exclusive
from torch_aclnn_ops.optim._flat import FlatGroup
from torch_aclnn_ops.optim._memory import check_memory, check_no_shared_memory
from torch_aclnn_ops.optim._options import EmaSchedule, options_of
from torch_aclnn_ops.optim._sharding import zero_that_makes_it
from torch_aclnn_ops.optim._states import (
    CachedState,
    complete,
    dtype_of_states,
    has_state,
    sync_master_from_param,
)
from torch_aclnn_ops.optim._without_grad import ParamsWithoutGrad, average

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["FusedEmaAdam"]


class FusedEmaAdam(AveragingOptimizer):
    r"""Adam, with L2 or decoupled weight decay, and an exponential moving average (EMA) of the weights, in one step.

    With :math:`g_t` the gradient of step :math:`t`, negated if ``maximize``, every element of a parameter
    :math:`\theta`, of its moments :math:`m` and :math:`v` and of its average :math:`s` goes through

    .. math::
        \begin{aligned}
        g_t &\leftarrow g_t + \lambda \theta_{t-1} \quad \text{only if not decoupled} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
            \quad \text{the divisors } 1 - \beta^t \text{ only with bias correction} \\
        u_t &\leftarrow u_t + \lambda \theta_{t-1} \quad \text{only if decoupled} \\
        \theta_t &= \theta_{t-1} - \text{lr} \cdot u_t \\
        s_t &= \text{ema\_decay} \cdot s_{t-1} + (1 - \text{ema\_decay}) \, \theta_t
        \end{aligned}

    That is :class:`torch.optim.AdamW`, or :class:`torch.optim.Adam` without ``decoupled_weight_decay``, followed by the
    EMA of :mod:`torch.optim.swa_utils`, whose first update copies the weights: ``ema_start_step=1``. The state of a
    parameter is made at its first step with a gradient: ``step``, ``exp_avg``, ``exp_avg_sq`` and ``ema_params``, the
    average, which starts as a copy of the weights. A bfloat16 or float16 parameter also gets ``master_params``, its
    weights in float32, and all its states are float32: an average in 16 bits loses every change of less than half a
    unit in the last place, which at ``ema_decay=0.999`` is most of them.
    A checkpoint of :class:`torch.optim.AdamW` or :class:`torch.optim.Adam`, or of MindSpeed's ``FusedEmaAdamW``, can be
    loaded, and theirs can load one of this.

    A parameter without a gradient, such as one that is frozen midway or an expert that gets no token, is not updated
    in a step, but its average goes on to move towards its weights, as in
    :class:`torch.optim.swa_utils.AveragedModel`, for a third of the time of an update; ``ema_without_grad=False`` stops
    it. Only dense real tensors are trained; ``amsgrad`` is refused. Buffers of a model are not averaged.

    Args:
        params: the parameters, or pairs of names and parameters, or dicts of parameter groups, each with any of the
            options below. Real floating-point, of any shape, on any device.
        lr: the learning rate, finite and at least 0. A one-element tensor may be on the CPU or on the parameters'
            device, which no step waits for.
        betas: how much of the averages of the gradient and of its square is kept per step, each in [0, 1).
        eps: is added to the denominator, outside the square root; finite and at least 0.
        weight_decay: the weight decay :math:`\lambda`, finite and at least 0.
        ema_decay: how much of the average of the weights is kept per step, in [0, 1].
        decoupled_weight_decay: subtract the decay from the weights (AdamW), do not add it to the gradient (Adam).
        bias_correction: divide the moments by :math:`1 - \beta^t`, because they start at 0.
        maximize: go up the gradient instead of down.
        ema_warmup: how the decay grows to ``ema_decay`` with the number n of updates of the average: not at all
            (``None``), as (1 + n) / (10 + n) (``"ratio"``), or as 1 - (1 + n / gamma) ** -power (``"power"``).
        ema_warmup_gamma: gamma of ``"power"``, in updates; above 0.
        ema_warmup_power: power of ``"power"``; above 0.
        ema_start_step: for the first ``ema_start_step`` steps the average equals the weights; at least 0. With 0 it
            starts from the initial weights, with 1 it is that of :class:`torch.optim.swa_utils.AveragedModel`.
        ema_update_every: steps from one update of the average to the next; at least 1.
        master_weights: keep float32 weights and states for 16-bit parameters. Without, their states have their dtype.
        ema_without_grad: let averages go on in steps in which their parameters have no gradient.
        flatten: keep weights, gradients and states of the parameters of a group in one buffer each, so that an NPU
            has one launch to do instead of one per parameter. Parameters become views of it in the first step. Some
            stay as they are: those that share their memory with another tensor, and tensor subclasses.

    Raises:
        TypeError: an option is not a number, or not a bool where one is wanted.
        ValueError: an option is out of range, or two parameters share memory.

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
        >>> torch.equal(model.weight, weight)
        True

    Source:
        The CANN operator aclnnApplyFusedEmaAdam. Adam: Kingma and Ba, 2015, https://arxiv.org/abs/1412.6980.
        AdamW: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101. The warm-ups are those of TensorFlow's
        ``ExponentialMovingAverage(num_updates)`` and of timm's ``ModelEmaV3``.
    """

    # torch.amp.GradScaler leaves the scale, and what to do about infinities, to the step.
    _step_supports_amp_scaling = True

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
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ema_decay": ema_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "maximize": maximize,
            "ema_warmup": ema_warmup,
            "ema_warmup_gamma": ema_warmup_gamma,
            "ema_warmup_power": ema_warmup_power,
            "ema_start_step": ema_start_step,
            "ema_update_every": ema_update_every,
            "master_weights": master_weights,
            "ema_without_grad": ema_without_grad,
        }
        options_of(defaults)
        if not isinstance(flatten, bool):
            raise TypeError(f"FusedEmaAdam: flatten must be True or False, but it is {flatten!r}")
        self._flatten = flatten
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; missing options are those of the constructor.

        Args:
            param_group: ``params`` and any options.

        Raises:
            TypeError: an option is not a number, or not a bool where one is wanted.
            ValueError: an option is out of range, a parameter is in another group already, or two share memory.
        """
        if isinstance(param_group, dict):
            options_of({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            zero = zero_that_makes_it()  # gives each rank some of its parameters
            check_no_shared_memory(self.param_groups if zero is None else zero.param_groups)
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...

    @torch.no_grad()
    @exclusive
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Update every parameter that has a gradient, and its average.

        All options and gradients are checked before any parameter is updated. Under a :class:`torch.amp.GradScaler`
        the step divides the gradients by the scale, and where the scaler has found an infinity nothing moves.

        A step that fails, or is interrupted, can be repeated. Each parameter, or run of neighbours of a flattened
        group, is updated with its step count, moments, master weights and average as a whole, or not at all. Those that
        were updated have ``grad = None`` after the exception, so that a second call updates the others only; a note of
        the exception names them. Gradients that are computed anew, also by ``closure``, are those of a new step. What a
        :class:`torch.amp.GradScaler` began, it has to repeat. After an NPU is lost, load a checkpoint.

        Args:
            closure: computes the loss and the gradients, and returns the loss.
            **kwargs: ``grad_scaler``, which ``torch_npu.npu.amp.GradScaler`` passes.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: a gradient is sparse, complex or unlike its parameter, a parameter has another shape than its
                state, or this is inside ``swap_ema_params``, or another thread is in a method of the optimizer.
            ValueError: an option of a group is out of range, or two parameters have come to share memory.
        """
        is_compiling = torch.compiler.is_compiling()
        loss = None
        if closure is not None:
            self._in_closure = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._in_closure = False
            if not is_compiling:
                self._make_whole("step")  # the closure may have left a swap
        parsed = [
            options_of(group) if is_compiling else self._checked_options[i].of(group)
            for i, group in enumerate(self.param_groups)
        ]
        have_moved = is_compiling or not self._placement.is_current(self.param_groups)
        if have_moved and not is_compiling:
            check_memory(self.param_groups, self.state)
        _steps.check_gradients(self.param_groups, self._flat_groups)
        grad_scale, found_inf = _steps.scaling_of(self, **kwargs)
        if found_inf is not None and not is_compiling and found_inf.is_cpu and found_inf:
            return loss
        if grad_scale is not None or found_inf is not None:
            parsed = [
                (options._replace(grad_scale=grad_scale, found_inf=found_inf), schedule) for options, schedule in parsed
            ]
        if is_explaining() and not is_compiling:
            _steps.log_implementations(self)
            return loss
        progress = StepProgress()
        if is_compiling:
            self._step_groups(parsed, False, have_moved, progress)
            return loss
        try:
            self._step_groups(parsed, self._flatten, have_moved, progress)
        except BaseException as error:
            self._progress = progress
            self._updated |= _steps.clear_used_gradients(self, progress, error)
            raise
        self._updated.clear()
        if have_moved:
            self._placement.remember(self.param_groups)
        return loss

    def _step_groups(
        self, parsed: list[tuple[Options, EmaSchedule]], is_flattened: bool, have_moved: bool, progress: StepProgress
    ) -> None:
        all_without_grad: list[ParamsWithoutGrad] = []
        steps: list[Tensor] = []
        for i, (options, schedule) in enumerate(parsed):
            without_grad = ParamsWithoutGrad([], [], [])
            all_without_grad.append(without_grad)
            if is_flattened and not self._step_flat(i, options, schedule, have_moved, progress, without_grad, steps):
                continue
            tensors = TensorLists([], [], [], [], [], [], [])
            self._init_group(i, is_flattened, have_moved, *tensors, *without_grad)
            if tensors.params:
                _steps.step_lists(tensors, options, schedule, progress)
                if not torch.compiler.is_compiling():
                    self._cached[i].remember_own_writes()
            steps += tensors.steps
        for without_grad, (options, schedule) in zip(all_without_grad, parsed, strict=True):
            if without_grad.averages:
                average(without_grad, steps + without_grad.steps, options, schedule, progress)

    def _step_flat(
        self,
        i: int,
        options: Options,
        schedule: EmaSchedule,
        have_moved: bool,
        progress: StepProgress,
        without_grad: ParamsWithoutGrad,
        steps: list[Tensor],
    ) -> list[Tensor]:
        """Update the flattened parameters of a group; return the others."""
        group, flat_group = self.param_groups[i], self._flat_groups.get(i)
        if flat_group is None or not flat_group.is_current(group, self.state, have_moved):
            flat_group = self._flat_groups[i] = FlatGroup(group, self.state, flat_group)
            flat_group.take_params()
        for buffer in flat_group.buffers:
            _steps.step_buffer(buffer, options, schedule, progress)
            self._warn(buffer.lacks_averages)
            steps.append(buffer.steps)
            if group["ema_without_grad"]:
                for listed, of_buffer in zip(without_grad, buffer.without_grad(self._updated), strict=True):
                    listed += of_buffer
        return flat_group.rest

    def _init_group(self, i: int, is_flattened: bool, have_moved: bool, *lists: list[Tensor]) -> None:
        """Fill ``TensorLists`` and ``ParamsWithoutGrad`` with what is not flattened.

        torch.compile knows a method of this name: it does not trace it, and takes numbers and lists for arguments.
        """
        group, cached = self.param_groups[i], self._cached.get(i)
        all_params = self._flat_groups[i].rest if is_flattened else group["params"]
        if cached is None or have_moved or not cached.is_current(all_params, self.state) or cached.new_params():
            for param in all_params:
                if param.grad is not None or has_state(self.state, param):
                    self._warn(complete(self.state[param], param, dtype_of_states(param, group["master_weights"])))
            cached = self._cached[i] = CachedState(all_params, self.state)
        if cached.were_params_written():
            for master, param in zip(cached.masters, cached.params, strict=True):
                if master is not param:
                    sync_master_from_param(local(master), local(param))
        all_grads = [param.grad for param in cached.params]
        has_grad = [grad is not None for grad in all_grads]
        of_params: tuple[list[Any], ...] = (cached.masters, all_grads, *cached.lists, cached.params)
        has_all = all(has_grad)
        for listed, of_all in zip(lists[:7], of_params, strict=True):
            listed += of_all if has_all else compress(of_all, has_grad)
        if group["ema_without_grad"] and not has_all:
            is_averaged = [
                not has and param not in self._updated for has, param in zip(has_grad, cached.params, strict=True)
            ]
            for listed, of_all in zip(lists[7:], (cached.masters, *cached.lists[2:]), strict=True):
                listed += compress(of_all, is_averaged)
