"""``FusedEmaAdam``: Adam or AdamW that keeps an exponential moving average of the weights (aclnnApplyFusedEmaAdam)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, overload

from torch_aclnn_ops.functional.ema_adam import Options, TensorLists, fused_ema_adam, why_unlike

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

__all__ = ["FusedEmaAdam"]


class FusedEmaAdam(Optimizer):
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
    EMA of :mod:`torch.optim.swa_utils`. The state of a parameter is made at its first step with a gradient: ``step``,
    ``exp_avg``, ``exp_avg_sq`` and ``ema_params``, the average, which starts as a copy of the weights.

    The operator takes one dtype for all its tensors, so moments and average have the parameter's dtype. **The average
    of bfloat16 or float16 parameters hardly moves:** each step rounds it, and a step that changes it by less than half
    a unit in the last place, as most do at ``ema_decay=0.999``, is lost. Keep float32 weights, and use autocast.

    Args:
        params: the parameters, or pairs of names and parameters, or dicts of parameter groups, each with any of the
            options below. Real floating-point, of any shape, on any device.
        lr: the learning rate, finite and at least 0. A one-element tensor is read as a number in every step, which
            waits for its device.
        betas: how much of the averages of the gradient and of its square is kept per step, each in [0, 1).
        eps: is added to the denominator, outside the square root; finite and at least 0.
        weight_decay: the weight decay :math:`\lambda`, finite and at least 0.
        ema_decay: how much of the average of the weights is kept per step, in [0, 1].
        decoupled_weight_decay: subtract the decay from the weights (AdamW), do not add it to the gradient (Adam).
        bias_correction: divide the moments by :math:`1 - \beta^t`, because they start at 0.
        maximize: go up the gradient instead of down.

    Raises:
        TypeError: an option is not a number, or not a bool where one is wanted.
        ValueError: an option is out of range.

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
        AdamW: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101.
    """

    _holds_ema_params = False

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
        }
        _options_of(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; missing options are those of the constructor.

        Args:
            param_group: ``params`` and any options.

        Raises:
            TypeError: an option is not a number, or not a bool where one is wanted.
            ValueError: an option is out of range, or a parameter is in another group already.
        """
        if isinstance(param_group, dict):
            _options_of({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, and its average.

        All options and gradients are looked at before any parameter is updated.

        Args:
            closure: computes the loss and the gradients, and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: a gradient is sparse, complex or unlike its parameter, or this is inside ``swap_ema_params``.
            ValueError: an option of a group is out of range.
        """
        self._refuse_with_ema_params("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options = [_options_of(group) for group in self.param_groups]
        self._check_gradients()
        for group, group_options in zip(self.param_groups, options, strict=True):
            tensors = TensorLists([], [], [], [], [], [])
            self._init_group(group, *tensors)
            fused_ema_adam(*tensors, **group_options._asdict())
        return loss

    @contextmanager
    def swap_ema_params(self) -> Iterator[None]:
        """Let the parameters hold their averages inside a ``with`` block.

        Parameters and averages exchange their contents in place, one parameter after the other. Afterwards, also after
        an exception, the parameters have their weights back bit for bit; what was written to them inside the block is
        in their averages. Parameters that were never updated keep their weights.

        Raises:
            RuntimeError: this is inside another ``swap_ema_params`` of the same optimizer.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = FusedEmaAdam(model.parameters())
            >>> with optimizer.swap_ema_params():
            ...     prediction = model(torch.ones(1, 2))
        """
        self._refuse_with_ema_params("swap_ema_params")
        pairs = [(param, state["ema_params"]) for param, state in self.state.items() if "ema_params" in state]
        exchanged: list[tuple[Tensor, Tensor]] = []
        self._holds_ema_params = True
        try:
            for pair in pairs:
                _exchange(*pair)
                exchanged.append(pair)
            yield
        finally:
            for pair in exchanged:
                _exchange(*pair)
            self._holds_ema_params = False

    def state_dict(self) -> dict[str, Any]:
        """Return options and state as :meth:`torch.optim.Optimizer.state_dict` does; refused in ``swap_ema_params``."""
        self._refuse_with_ema_params("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state as :meth:`torch.optim.Optimizer.load_state_dict` does; refused in ``swap_ema_params``.

        Options that are missing stay as they are. Where ``ema_params`` is missing, the average starts at the next step.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._refuse_with_ema_params("load_state_dict")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_with_ema_params("__getstate__")
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        previous_groups = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        for group, previous in zip_longest(self.param_groups, previous_groups, fillvalue=self.defaults):
            for name in self.defaults.keys() - {"differentiable"}:  # which the base class adds here
                group.setdefault(name, previous[name])
            for param in group["params"]:
                if "step" in self.state.get(param, {}):
                    # Other optimizers save a float, and the base class leaves it on the device it was saved from.
                    step = torch.as_tensor(self.state[param]["step"])
                    self.state[param]["step"] = step.to(param.device, torch.int64)

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        ema_params: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        """Fill the lists, and make the states that are missing; torch.compile knows a method of this name and form."""
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if "step" not in state:
                # The operator reads an int64 step on the parameter's device: kept there, nothing has to wait for it.
                state["step"] = torch.zeros((), dtype=torch.int64, device=param.device)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            if "ema_params" not in state:
                state["ema_params"] = param.clone()
            params.append(param)
            grads.append(param.grad)
            exp_avgs.append(state["exp_avg"])
            exp_avg_sqs.append(state["exp_avg_sq"])
            ema_params.append(state["ema_params"])
            steps.append(state["step"])

    def _check_gradients(self) -> None:
        for i, group in enumerate(self.param_groups):
            for j, param in enumerate(group["params"]):
                problem = param.grad is not None and why_unlike(param.grad, param)
                if problem:
                    raise RuntimeError(f"FusedEmaAdam: the gradient of parameter {j} of group {i} {problem}")

    def _refuse_with_ema_params(self, method: str) -> None:
        if self._holds_ema_params:
            raise RuntimeError(
                f"FusedEmaAdam.{method}: inside swap_ema_params() the parameters hold their averages, and the state"
                " holds their weights; leave the with block first"
            )


def _options_of(group: dict[str, Any]) -> Options:
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() == 1:
        lr = lr.item()
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"FusedEmaAdam: betas must be a pair of numbers, but it is {betas!r}")
    others = (field for field in Options._fields if field not in ("lr", "beta1", "beta2"))
    options = Options(lr=lr, beta1=betas[0], beta2=betas[1], **{field: group[field] for field in others})
    options.check()
    return options


def _exchange(param: Tensor, ema_param: Tensor) -> None:
    with torch.no_grad():
        weights = param.clone()
        param.copy_(ema_param)
        ema_param.copy_(weights)
