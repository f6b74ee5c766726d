"""Checks of each drop-in in every dtype, and of the raw operators of a shard, against float64 on the CPU."""

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch_aclnn_ops import functional, ops
from torch_aclnn_ops._drop_ins import DROP_INS
from torch_aclnn_ops._numerics import HALF_DTYPES, half_dtypes
from torch_aclnn_ops._operator_paths import is_on_this_chip

import torch
import torch.nn.functional as F
from torch import Tensor

CLASSES = 160
# Relative to the largest element. A float32 result is a sum of a few hundred terms. A 16-bit result is rounded three
# times: the gradient of the logits, its matrix product, and the multiplication by grad_output.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 3 * 2**-11,
    torch.bfloat16: 3 * 2**-8,
}
_RAW = {name: getattr(ops, name) for name in ops.__all__}
_OF_A_HEAD = (
    "fused_linear_online_max_sum",
    "fused_cross_entropy_loss_with_max_sum",
    "fused_linear_cross_entropy_loss_grad",
)


class Call(NamedTuple):
    """A call of a drop-in: the function, torch's function, differentiated inputs, and other arguments."""

    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[], list[Tensor]]
    constants: Callable[[], list[Tensor]]


def dtypes_of(device: str) -> list[torch.dtype]:
    """Return the dtypes that a device computes in, the 16-bit dtype for training last."""
    lacking = set(HALF_DTYPES).difference(half_dtypes(device))
    return [dtype for dtype in TOLERANCES if dtype not in lacking]


def launched_on(device: str) -> list[str]:
    """Return the names of the operators that the checks launch on an NPU, or of all of them on the CPU.

    Some chips lack operators, and some have only a part of those of a head, which are used together.
    """
    launched = [name for name, operator in _RAW.items() if device != "npu" or is_on_this_chip(operator)]
    has_head = set(launched).issuperset(_OF_A_HEAD)
    return [name for name in launched if has_head or name not in _OF_A_HEAD]


def normal(*shape: int) -> Tensor:
    """Return a float64 tensor of a standard normal distribution."""
    return torch.randn(shape, dtype=torch.float64)


def head(features: int, classes: int = CLASSES) -> Tensor:
    """Return a head whose logits are about 1, so that kernels with 16-bit logits stay accurate."""
    return normal(classes, features) / math.sqrt(features)


def linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the reference of the drop-in from full logits."""
    loss: Tensor = F.cross_entropy(F.linear(input, weight), target)
    return loss


def calls() -> dict[str, Call]:
    """Return a call of each drop-in by name."""
    made = {
        "embedding": Call(
            lambda weight, indices: functional.embedding(indices, weight),
            lambda weight, indices: F.embedding(indices, weight),
            lambda: [normal(50, 12)],
            lambda: [torch.randint(50, (9, 4))],
        ),
        "linear_cross_entropy": Call(
            functional.linear_cross_entropy,
            linear_cross_entropy,
            lambda: [normal(40, 24), head(24)],
            lambda: [torch.randint(CLASSES, (40,))],
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
                lambda: [normal(7, 33).sigmoid()],
                partial(_probabilities, len(needed) - 1),
            )
    return {name: made[name] for name in DROP_INS}


def _probabilities(number: int) -> list[Tensor]:
    return [normal(7, 33).sigmoid() for _ in range(number)]


def checks(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check and a function that returns its error, or raises."""
    for name, call in calls().items():
        for dtype in dtypes_of(device):
            yield f"{name}, {dtype}", partial(_check_call, call, device, dtype)
    if set(_OF_A_HEAD).issubset(launched_on(device)):
        yield f"raw operators of linear_cross_entropy, {dtype}", partial(_check_shard, device, dtype)


def error_of(found: Tensor, truth: Tensor, dtype: torch.dtype, what: str) -> float:
    """Return the error relative to the largest element; raise if it exceeds the tolerance of the dtype."""
    found, scale = found.detach().cpu().double(), max(1e-3, truth.abs().max().item())
    error = (found - truth.detach()).abs().max().item() / scale
    if not error <= TOLERANCES[dtype]:
        tolerance = f"{TOLERANCES[dtype]:.1e}"
        raise ArithmeticError(f"the error of {what} is {error:.1e}, which exceeds the tolerance of {tolerance}")
    return error


def _check_call(call: Call, device: str, dtype: torch.dtype) -> str:
    constants = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in call.constants()]
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in call.inputs()]
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    result = call.function(*inputs, *(tensor.to(device) for tensor in constants))
    truth = call.reference(*exact, *(tensor.double() if tensor.is_floating_point() else tensor for tensor in constants))
    grad = normal(*truth.shape).to(dtype)
    gradients = torch.autograd.grad(result, inputs, grad.to(device, result.dtype))
    truths = torch.autograd.grad(truth, exact, grad.double())
    errors = [error_of(result, truth, dtype, "the result")]
    errors += [error_of(*pair, dtype, "a gradient") for pair in zip(gradients, truths, strict=True)]
    return f"error {max(errors):.1e}"


def _check_shard(device: str, dtype: torch.dtype) -> str:
    """Check the raw operators of the linear cross entropy on a shard of all classes."""
    input, weight = normal(40, 24).to(dtype), head(24).to(dtype)
    target = torch.randint(CLASSES, (40,))
    on_device = [tensor.to(device) for tensor in (input, weight, target)]
    *statistics, target_mask, masked_target, logits = ops.fused_linear_online_max_sum(*on_device, 0, CLASSES, True)
    loss, softmax = ops.fused_cross_entropy_loss_with_max_sum(*statistics, logits)
    exact = [tensor.double().requires_grad_() for tensor in (input, weight)]
    truth = F.cross_entropy(F.linear(*exact), target, reduction="none")
    gradients = ops.fused_linear_cross_entropy_loss_grad(
        torch.ones(40, device=device), *on_device[:2], target_mask, masked_target, None, None, softmax
    )
    truths = torch.autograd.grad(truth.sum(), exact)
    errors = [error_of(loss, truth, dtype, "the loss")]
    errors += [error_of(*pair, dtype, "a gradient") for pair in zip(gradients, truths, strict=True)]
    return f"error {max(errors):.1e}"
