"""What CANN's operators take on an NPU, in the words in which a path is explained."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

# Takes a family of chips and all arguments of a schema; returns what CANN's operator does not take of them, or None.
Limits = Callable[..., str | None]

# Families of chips: names of chips begin with these; of two that fit, the longer counts.
EVERY_CHIP = ("Ascend910", "Ascend910B", "Ascend910_93", "Ascend310P", "Ascend950")
MAX_RANK = 8
_EVERYWHERE = (torch.float32, torch.float16)
_WITHOUT_BFLOAT16 = ("Ascend910", "Ascend310P")


def why_not_rank(names: Sequence[str], arguments: Iterable[object]) -> str | None:
    """Return why no operator of CANN takes the ranks of these tensors, or ``None``."""
    for i, tensor in enumerate(arguments):
        if isinstance(tensor, Tensor) and tensor.dim() > MAX_RANK:
            return f"{names[i]} has {tensor.dim()} dimensions and CANN's operators take at most {MAX_RANK}"
    return None


def why_not_dtype(soc: str, names: Sequence[str], *tensors: Tensor | None) -> str | None:
    """Return why an operator for float32, float16 and bfloat16 does not take these tensors, or ``None``."""
    for i, tensor in enumerate(tensors):
        if tensor is None or tensor.dtype in _EVERYWHERE:
            continue
        if tensor.dtype != torch.bfloat16 or soc in _WITHOUT_BFLOAT16:
            return f"{names[i]} is {tensor.dtype}, which CANN's operator does not take on {soc}"
    return None


def why_not_chip(soc: str, chips: Collection[str]) -> str | None:
    """Return why an operator that some families of chips have does not run on a chip, or ``None``."""
    return None if soc in chips else f"CANN's operator is not supported on {soc}"
