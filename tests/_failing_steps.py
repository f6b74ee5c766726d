"""Steps and swaps of ``FusedEmaAdam`` in which an operator of torch fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests._optim import SETTINGS, Weights, states_of

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masters": {"dtypes": (torch.bfloat16, torch.bfloat16)},
    "16-bit states": {"dtypes": (torch.bfloat16, torch.float16), "master_weights": False},
    "mixed": {"dtypes": (torch.float32, torch.bfloat16), "ema_warmup": "ratio"},
    "flat": {"flatten": True},
    "flat masters": {"dtypes": (torch.bfloat16, torch.bfloat16), "flatten": True},
    "flat mixed": {"dtypes": (torch.float32, torch.bfloat16), "flatten": True, "ema_warmup": "ratio"},
    "scaler": {"scaled": True},
    "scaler masters": {"dtypes": (torch.float16, torch.float16), "scaled": True},
    "scaler flat": {"scaled": True, "flatten": True},
    "tensor lr": {"lr": torch.tensor(1e-2)},
}


class Failed(RuntimeError):
    """The exception of an injected failure."""


class FailOperators(TorchDispatchMode):
    """Makes some operators of torch raise before they do anything.

    Args:
        first: The number of operators that run before.
        count: The number of operators that fail.
        name: Only operators with this in their name count.
        error: The exception that they raise.
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
    """A model in two groups and its optimizer, before its third step."""

    def __init__(
        self,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        scaled: bool = False,
        **options: Any,
    ) -> None:
        models = [Weights(dtype, seed) for seed, dtype in enumerate(dtypes)]
        every = 1 if dtypes[0] != dtypes[1] else 2  # with one dtype, the groups share the shapes
        groups = [{"params": list(model.parameters())[i % every :: every]} for i, model in enumerate(models)]
        self.params = [param for group in groups for param in group["params"]]
        self.optimizer = FusedEmaAdam(groups, **{**SETTINGS, **options})
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        for step in range(2):
            self.set_gradients(step)
            self.step()
            if self.scaler:
                self.scaler.update()
        self.set_gradients(2)
        self.weights, self.checkpoint = self.contents()[: len(self.params)], copy.deepcopy(self.optimizer.state_dict())

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for param in self.params:
            grad = torch.randn(param.shape, generator=generator) * (8.0 if self.scaler else 1.0)
            param.grad = torch.empty_like(param).copy_(grad)
        if self.scaler:
            self.scaler.scale(torch.ones(()))

    def step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()

    def swap(self) -> None:
        with self.optimizer.swap_ema_params():
            for param in self.params:
                param.detach()

    def contents(self) -> list[Tensor]:
        """Return copies of the weights and the states."""
        return [*(param.detach().clone() for param in self.params), *states_of(self.optimizer)]

    def resume(self) -> None:
        """Load the checkpoint that an exception requests, and repeat the step."""
        with torch.no_grad():
            for param, weight in zip(self.params, self.weights, strict=True):
                param.copy_(weight)
        self.optimizer.load_state_dict(copy.deepcopy(self.checkpoint))
        if self.scaler:
            self.scaler.update(8.0)
        self.set_gradients(2)
        self.step()
