"""Checks of FusedEmaAdam against torch's AdamW and an EMA with ``lerp_``, in float64 on the CPU."""

from collections.abc import Callable, Iterator
from functools import partial

from torch_aclnn_ops.optim import FusedEmaAdam
from torch_aclnn_ops.verify._operators import dtypes_of

import torch
from torch import Tensor

_LR, _WEIGHT_DECAY, _EMA_DECAY = 0.01, 0.1, 0.9
# Relative to the largest element: CANN computes 1 - beta ** step in float32, which cancels in the first steps.
_TOLERANCE = 1e-4
# The rounding error of a parameter.
_ROUNDINGS = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def checks(device: str, steps: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check and a function that returns its error, or raises."""
    for dtype in (torch.float32, dtypes_of(device)[-1]):
        yield f"{steps} steps, {dtype}", partial(_check_steps, device, dtype, steps)


def _check_steps(device: str, dtype: torch.dtype, steps: int) -> str:
    """Compare weights and EMA weights after steps with the same gradients; 16-bit weights have master weights."""
    param = torch.nn.Parameter(torch.randn(33, 7).to(dtype).to(device))
    truth = torch.nn.Parameter(param.detach().cpu().double())
    average = truth.detach().clone()
    optimizer = FusedEmaAdam([param], _LR, weight_decay=_WEIGHT_DECAY, ema_decay=_EMA_DECAY)
    reference = torch.optim.AdamW([truth], _LR, weight_decay=_WEIGHT_DECAY)
    for _ in range(steps):
        gradient = torch.randn(33, 7).to(dtype)
        param.grad, truth.grad = gradient.to(device), gradient.double()
        optimizer.step()
        reference.step()
        average.lerp_(truth.detach(), 1 - _EMA_DECAY)
    errors = [_error(param, truth.detach(), "a weight", dtype)]
    with optimizer.swap_ema_params():
        errors.append(_error(param, average, "an EMA weight", dtype))
    return f"error {max(errors):.1e}"


def _error(found: Tensor, truth: Tensor, what: str, dtype: torch.dtype) -> float:
    error = (found.detach().cpu().double() - truth).abs().max().item() / truth.abs().max().item()
    allowed = _TOLERANCE + _ROUNDINGS[dtype]
    if not error <= allowed:
        raise ArithmeticError(f"the error of {what} is {error:.1e}, which exceeds the tolerance of {allowed:.1e}")
    return error
