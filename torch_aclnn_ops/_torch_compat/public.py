"""Documented names of torch that are missing in some versions, or documented as unstable.

Names without a comment exist in all supported versions and are required. The others state the first version that has
them, and the fallback.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.backends import cpu
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.library import register_vmap as register_vmap
from torch.nn import Buffer as Buffer
from torch.nn import Module

cpu_capability = cpu.get_cpu_capability
# In torch 2.11, Dynamo drops the gradient of an autograd.Function that returns the result of a collective.
COMPILES_COLLECTIVES = not torch.__version__.startswith("2.11.")
in_jit_trace: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


class _LinearCrossEntropyLoss(Module):
    """Fallback for torch's module, with its constructor, parameters and representation; a call checks the values."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: None = None,
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.register_buffer("weight", weight)
        self.num_classes = num_classes
        self.out_features = out_features
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        outputs = num_classes * math.prod(out_features)
        self.linear = torch.nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        names = ("reduction", "ignore_index", "label_smoothing", "options")
        values = {
            "in_features": self.linear.in_features,
            "num_classes": self.num_classes,
            "out_features": self.out_features,
            "bias": self.linear.bias is not None,
            **{name: getattr(self, name) for name in names},
        }
        return ", ".join(f"{name}={value}" for name, value in values.items())


if TYPE_CHECKING:
    from torch.nn import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from torch.nn import LinearCrossEntropyOptions as LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy as linear_cross_entropy
else:
    # Since 2.13. Fallbacks: options= raises, the module uses the base class above, and the function is composed.
    LinearCrossEntropyOptions = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    linear_cross_entropy = getattr(torch.nn.functional, "linear_cross_entropy", None)
    LinearCrossEntropyLoss = getattr(torch.nn, "LinearCrossEntropyLoss", None) or _LinearCrossEntropyLoss


def synchronize(device: torch.device) -> None:
    """Wait until all work submitted to a device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
