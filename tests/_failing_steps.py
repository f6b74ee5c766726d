"""Steps and swaps of ``FusedEmaAdam`` in which an operator of torch or a function of CANN fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests._optim import SETTINGS, STATE, Weights

Contents = tuple[Tensor, ...]  # of a parameter and its state
WARM_UP = "ema_warmup"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masters": {"dtypes": (torch.bfloat16, torch.bfloat16)},
    "16-bit states": {"dtypes": (torch.bfloat16, torch.float16), "master_weights": False},
    "mixed": {"dtypes": (torch.float32, torch.bfloat16), WARM_UP: "ratio"},
    "flat": {"flatten": True},
    "flat masters": {"dtypes": (torch.bfloat16, torch.bfloat16), "flatten": True},
    "flat mixed": {"dtypes": (torch.float32, torch.bfloat16), "flatten": True, WARM_UP: "ratio"},
    "scaler": {"scaled": True},
    "scaler masters": {"dtypes": (torch.float16, torch.float16), "scaled": True},
    "scaler flat": {"scaled": True, "flatten": True},
    "tensor lr": {"lr": "tensor"},
}


class Failed(RuntimeError):
    """What an injected failure raises."""


class FailOperators(TorchDispatchMode):
    """Lets some operators of torch raise before they do anything.

    Args:
        first: how many are done before.
        count: how many fail.
        name: only operators with this in their name count.
        error: what they raise.
    """

    def __init__(self, first: int, count: int, name: str = "", error: type[BaseException] = Failed) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._failing, self._name, self._error = range(first, first + count), name, error

    def run(self, action: Callable[[], object]) -> None:
        with self:
            action()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != "profiler" and self._name in str(function):
            self.seen.append(str(function))
            if len(self.seen) - 1 in self._failing:
                raise self._error(f"asked for by a trial: {function}")
        return function(*args, **(kwargs or {}))


class Trainee:
    """A model in two groups, with its optimizer, in front of a step."""

    def __init__(
        self,
        device: str,
        steps: int,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        scaled: bool = False,
        **options: Any,
    ) -> None:
        self.models = [Weights(dtype, seed).to(device) for seed, dtype in enumerate(dtypes)]
        if options.get("lr") == "tensor":
            options["lr"] = torch.tensor(1e-2, device=device)
        groups = [{"params": list(model.parameters())} for model in self.models]
        self.optimizer = FusedEmaAdam(groups, **{**SETTINGS, **options})
        self.scaler = torch.amp.GradScaler(device, init_scale=8.0) if scaled else None
        for step in range(steps):
            self.set_gradients(step)
            self.step()
            self.after_step()
        self.set_gradients(steps)

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for model in self.models for param in model.parameters()]

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for param in self.params:
            grad = torch.randn(param.shape, generator=generator) * (8.0 if self.scaler else 1.0)
            param.grad = torch.empty_like(param).copy_(grad)
        if self.scaler:
            self.scaler.scale(torch.ones((), device=self.params[0].device))

    def step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()

    def after_step(self) -> None:
        if self.scaler:
            self.scaler.update()

    def contents(self) -> list[Contents]:
        """Return what belongs to each parameter."""
        states = [self.optimizer.state.get(param, {}) for param in self.params]
        names = (*STATE, "master_params")
        return [
            tuple(
                tensor.detach().cpu().clone() for tensor in (param, *(state[name] for name in names if name in state))
            )
            for param, state in zip(self.params, states, strict=True)
        ]


def are_equal(first: Contents, second: Contents) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@cache
def contents_after(device: str, name: str, steps: int) -> list[Contents]:
    """Return what belongs to each parameter after a step that nothing disturbs."""
    trainee = Trainee(device, steps, **CONFIGURATIONS[name])
    trainee.step()
    return trainee.contents()


class Attempt:
    """A step or a swap in which something is going to fail.

    Args:
        device: ``"cpu"`` or ``"npu"``.
        name: one of ``CONFIGURATIONS``.
        action: ``"step"`` or ``"swap"``.
        steps: how many were done before.
    """

    def __init__(self, device: str, name: str, action: str, steps: int) -> None:
        self._after = contents_after(device, name, steps)
        self._trainee, self._steps = Trainee(device, steps, **CONFIGURATIONS[name]), steps
        self._before = self._trainee.contents()
        self._weights = [param.detach().clone() for param in self._trainee.params]
        self._checkpoint = copy.deepcopy(self._trainee.optimizer.state_dict())
        self._is_step = action == "step"

    def act(self) -> None:
        if self._is_step:
            self._trainee.step()
            return
        with self._trainee.optimizer.swap_ema_params():
            for param in self._trainee.params:
                param.detach()

    def lost(self, error: BaseException | None) -> str:
        """Say what is wrong after this exception, or nothing."""
        contents = self._trainee.contents()
        if not self._is_step:
            is_told = "could not be restored; load a checkpoint" in str(error)
            return self._lost_by_checkpoint() if is_told else self._lost_by_swap(contents)
        if error is None:
            return "" if all(map(are_equal, contents, self._after)) else "a step without an exception is wrong"
        is_told = "may be partly updated; load a checkpoint" in "".join(getattr(error, "__notes__", ()))
        if not is_told and any(
            not torch.equal(one[0], old[0]) for one, old in zip(contents, self._before, strict=True)
        ):
            return "parameters changed, but the exception does not say so"
        return self._lost_by_checkpoint()

    def _lost_by_swap(self, contents: list[Contents]) -> str:
        """Compare with what was before, and swap again."""
        if not all(map(are_equal, contents, self._before)):
            return "weights or averages differ"
        optimizer, params = self._trainee.optimizer, self._trainee.params
        pairs = zip(params, self._weights, strict=True)
        # Before the first step the weights serve as averages.
        averages = [optimizer.state.get(param, {}).get("ema_params", weight) for param, weight in pairs]
        with optimizer.swap_ema_params():
            are_shown = [
                torch.equal(param, average.to(param.dtype)) for param, average in zip(params, averages, strict=True)
            ]
        return "" if all(are_shown) else "another swap does not show the averages"

    def _lost_by_checkpoint(self) -> str:
        """Load the checkpoint that an exception asks for, and repeat the step."""
        trainee = self._trainee
        with torch.no_grad():
            for param, weight in zip(trainee.params, self._weights, strict=True):
                param.copy_(weight)
        trainee.optimizer.load_state_dict(copy.deepcopy(self._checkpoint))
        if trainee.scaler:
            trainee.scaler.update(8.0)
        trainee.set_gradients(self._steps)
        trainee.step()
        wrong = [i for i, pair in enumerate(zip(trainee.contents(), self._after, strict=True)) if not are_equal(*pair)]
        return f"after a checkpoint and a step parameters {wrong} differ" if wrong else ""
