"""The averages in the place of the weights: in the model itself, in a state dict, in a file."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_aclnn_ops.functional._ema_adam_implementations import local

import torch
from torch import Tensor, nn


class Exchange:
    """A parameter that holds its average for a while, and gets its weights back bit for bit.

    Args:
        param: the parameter.
        ema_param: its average, which may be of another dtype.
    """

    def __init__(self, param: Tensor, ema_param: Tensor) -> None:
        self._param, self._ema_param = local(param), local(ema_param)
        self._is_rounded = param.dtype != ema_param.dtype
        self._weights: Tensor | None = None

    @torch.no_grad()
    def enter(self) -> None:
        """Write the average to the parameter; it holds the weights meanwhile, if it can hold them exactly."""
        weights = self._param.clone()
        self._param.copy_(self._ema_param)
        if self._is_rounded:
            self._weights = weights
        else:
            self._ema_param.copy_(weights)

    @torch.no_grad()
    def leave(self) -> None:
        """Write the weights back to the parameter, and what it holds to the average."""
        held = self._param.clone()
        if self._weights is None:
            self._param.copy_(self._ema_param)
            self._ema_param.copy_(held)
            return
        self._param.copy_(self._weights)
        is_untouched = self._ema_param.to(held.dtype) == held
        self._ema_param.copy_(torch.where(is_untouched, self._ema_param, held.to(self._ema_param.dtype)))


@torch.no_grad()
def ema_state_dict(states: Mapping[Tensor, Mapping[str, Any]], model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict with averages for weights; tied weights stay one tensor."""
    contents = model.state_dict(keep_vars=True)
    copies: dict[int, Tensor] = {}
    for name, value in contents.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                average = states.get(value, {}).get("ema_params", value)
                copies[id(value)] = average.detach().to(value.dtype, copy=True)
            contents[name] = copies[id(value)]
    return contents


def save(contents: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a file so that there is the old one or the whole new one at any time."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(dict(contents), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
