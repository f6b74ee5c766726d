"""The arithmetic rules that the formulas share."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that an operator computes in: float64 for float64, else float32, as the device does."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(tensor: Tensor) -> Tensor:
    """Cast to the dtype that the operator computes in, so that a formula rounds to 16 bits once, at its end."""
    return tensor.to(accumulation_dtype(tensor.dtype))
