"""Checks of every operator and the optimizer on this machine, for ``doctor --check``."""

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch_aclnn_ops import functional
from torch_aclnn_ops._checks import DROP_INS
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
import torch.nn.functional as F
from torch import Tensor

_CLASSES = 160
# Relative to the largest element. A float32 result is a sum of a few hundred terms. A 16-bit result is rounded three
# times: the gradient of the logits, its matrix product, and the multiplication by grad_output.
_TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 3 * 2**-11,
    torch.bfloat16: 3 * 2**-8,
}
_STEPS = 200
_LR, _WEIGHT_DECAY, _EMA_DECAY = 0.01, 0.1, 0.9
# Relative to the largest element: CANN computes 1 - beta ** step in float32, which cancels in the first steps.
_STEP_TOLERANCE = 1e-4
# The rounding error of a parameter.
_ROUNDINGS = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
_Check = Callable[[], str]


def checks(device: str) -> Iterator[tuple[str, str, _Check]]:
    """Yield the group and name of each check, and a function that returns its error, or raises."""
    yield from (("operator", *one) for one in _of_operators(device))
    for dtype in (torch.float32, _dtypes_of(device)[-1]):
        yield "optimizer", f"{_STEPS} steps, {dtype}", partial(_check_steps, device, dtype)


def _of_operators(device: str) -> Iterator[tuple[str, _Check]]:
    for name, call in _calls().items():
        for dtype in _dtypes_of(device):
            # A head in float64 falls back to matrix products, for which CANN has no float64.
            if (device, name, dtype) != ("npu", "linear_cross_entropy", torch.float64):
                yield f"{name}, {dtype}", partial(_check_call, call, device, dtype)


class Call(NamedTuple):
    """A call of a drop-in: the function, torch's function, differentiated inputs, and other arguments."""

    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[], list[Tensor]]
    constants: Callable[[], list[Tensor]]


def _dtypes_of(device: str) -> list[torch.dtype]:
    """Return the dtypes that a device computes in, the 16-bit dtype for training last; some NPUs lack bfloat16."""
    has_bfloat16 = device != "npu" or torch.npu.is_bf16_supported()  # type: ignore[attr-defined]
    return [dtype for dtype in _TOLERANCES if has_bfloat16 or dtype != torch.bfloat16]


def _normal(*shape: int) -> Tensor:
    """Return a float64 tensor of a standard normal distribution."""
    return torch.randn(shape, dtype=torch.float64)


def _head(features: int, classes: int = _CLASSES) -> Tensor:
    """Return a head whose logits are about 1, so that kernels with 16-bit logits stay accurate."""
    return _normal(classes, features) / math.sqrt(features)


def _linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the reference of the drop-in from full logits."""
    loss: Tensor = F.cross_entropy(F.linear(input, weight), target)
    return loss


def _calls() -> dict[str, Call]:
    """Return a call of each drop-in by name."""
    made = {
        "embedding": Call(
            lambda weight, indices: functional.embedding(indices, weight),
            lambda weight, indices: F.embedding(indices, weight),
            lambda: [_normal(50, 12)],
            lambda: [torch.randint(50, (9, 4))],
        ),
        "linear_cross_entropy": Call(
            functional.linear_cross_entropy,
            _linear_cross_entropy,
            lambda: [_normal(40, 24), _head(24)],
            lambda: [torch.randint(_CLASSES, (40,))],
        ),
    }
    # Functions of an input, and losses of an input and a target of the same shape. All of them accept probabilities.
    for name in DROP_INS:
        parameters = inspect.signature(getattr(functional, name)).parameters.values()
        needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        if needed in (["input"], ["input", "target"]):
            made[name] = Call(
                getattr(functional, name),
                getattr(F, name),
                lambda: [_normal(7, 33).sigmoid()],
                partial(_probabilities, len(needed) - 1),
            )
    return {name: made[name] for name in DROP_INS}


def _probabilities(number: int) -> list[Tensor]:
    return [_normal(7, 33).sigmoid() for _ in range(number)]


def _error_of(found: Tensor, truth: Tensor, dtype: torch.dtype, what: str) -> float:
    """Return the error relative to the largest element; raise if it exceeds the tolerance of the dtype."""
    found, scale = found.detach().cpu().double(), max(1e-3, truth.abs().max().item())
    error = (found - truth.detach()).abs().max().item() / scale
    if not error <= _TOLERANCES[dtype]:
        tolerance = f"{_TOLERANCES[dtype]:.1e}"
        raise ArithmeticError(f"the error of {what} is {error:.1e}, which exceeds the tolerance of {tolerance}")
    return error


def _check_call(call: Call, device: str, dtype: torch.dtype) -> str:
    constants = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in call.constants()]
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in call.inputs()]
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    result = call.function(*inputs, *(tensor.to(device) for tensor in constants))
    truth = call.reference(*exact, *(tensor.double() if tensor.is_floating_point() else tensor for tensor in constants))
    grad = _normal(*truth.shape).to(dtype)
    gradients = torch.autograd.grad(result, inputs, grad.to(device, result.dtype))
    truths = torch.autograd.grad(truth, exact, grad.double())
    errors = [_error_of(result, truth, dtype, "the result")]
    errors += [_error_of(*pair, dtype, "a gradient") for pair in zip(gradients, truths, strict=True)]
    return f"error {max(errors):.1e}"


def _check_steps(device: str, dtype: torch.dtype) -> str:
    """Compare weights and EMA weights after steps with the same gradients; 16-bit weights have master weights."""
    param = torch.nn.Parameter(torch.randn(33, 7).to(dtype).to(device))
    truth = torch.nn.Parameter(param.detach().cpu().double())
    average = truth.detach().clone()
    optimizer = FusedEmaAdam([param], _LR, weight_decay=_WEIGHT_DECAY, ema_decay=_EMA_DECAY)
    reference = torch.optim.AdamW([truth], _LR, weight_decay=_WEIGHT_DECAY)
    for _ in range(_STEPS):
        gradient = torch.randn(33, 7).to(dtype)
        param.grad, truth.grad = gradient.to(device), gradient.double()
        optimizer.step()
        reference.step()
        average.lerp_(truth.detach(), 1 - _EMA_DECAY)
    errors = [_error_of_step(param, truth.detach(), "a weight", dtype)]
    with optimizer.swap_ema_params():
        errors.append(_error_of_step(param, average, "an EMA weight", dtype))
    return f"error {max(errors):.1e}"


def _error_of_step(found: Tensor, truth: Tensor, what: str, dtype: torch.dtype) -> float:
    error = (found.detach().cpu().double() - truth).abs().max().item() / truth.abs().max().item()
    allowed = _STEP_TOLERANCE + _ROUNDINGS[dtype]
    if not error <= allowed:
        raise ArithmeticError(f"the error of {what} is {error:.1e}, which exceeds the tolerance of {allowed:.1e}")
    return error
