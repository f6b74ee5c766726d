"""What CANN's operators support on an NPU; reasons are phrased as ``explain`` shows them."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

# Takes a chip family and all arguments of a schema; returns why CANN's operator does not support them, or None.
Limits = Callable[..., str | None]

# Chip families are prefixes of chip names; the longest matching prefix applies.
EVERY_CHIP = ("Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950")
MAX_RANK = 8
_EVERYWHERE = (torch.float32, torch.float16)
_WITHOUT_BFLOAT16 = ("Ascend910", "Ascend310P")


def why_not_rank(names: Sequence[str], arguments: Iterable[object]) -> str | None:
    """Return why CANN does not support the number of dimensions of these tensors, or ``None``."""
    for i, tensor in enumerate(arguments):
        if isinstance(tensor, Tensor) and tensor.dim() > MAX_RANK:
            return f"{names[i]} has {tensor.dim()} dimensions and CANN's operators support at most {MAX_RANK}"
    return None


def why_not_dtype(soc: str, names: Sequence[str], *tensors: Tensor | None) -> str | None:
    """Return why an operator for float32, float16 and bfloat16 does not support these dtypes, or ``None``."""
    for i, tensor in enumerate(tensors):
        if tensor is None or tensor.dtype in _EVERYWHERE:
            continue
        if tensor.dtype != torch.bfloat16 or soc in _WITHOUT_BFLOAT16:
            return f"{names[i]} is {tensor.dtype}, which CANN's operator does not support on {soc}"
    return None


def why_not_chip(soc: str, chips: Collection[str]) -> str | None:
    """Return why an operator of these chip families does not run on a chip, or ``None``."""
    return None if soc in chips else f"CANN's operator is not supported on {soc}"
