"""Checks of invalid arguments on an NPU: the call raises before a launch, and the next call is correct."""

from collections.abc import Callable, Iterator
from functools import partial

from torch_aclnn_ops import functional, ops
from torch_aclnn_ops.verify._operators import launched_on

import torch

_Call = Callable[[], object]


def checks(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check and a function that returns the type of the error, or raises."""

    def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = device) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    double = torch.float64
    adam = {"lr": 0.1, "ema_decay": 0.9, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}
    step = torch.ones(1, dtype=torch.int64, device=device)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    # With a word of the message: errors of the package name the argument, those of CANN its operator.
    calls: dict[str, tuple[str, _Call]] = {
        "float64": ("aclnn", lambda: ops.mse_loss_backward(*[ones(2, dtype=double)] * 3, 1)),
        "nine dimensions": ("aclnn", lambda: ops.mse_loss_backward(*[ones(*[1] * 9)] * 3, 1)),
        "a float32 head": (
            "aclnn",
            lambda: ops.fused_linear_online_max_sum(ones(3, 256), ones(160, 256), target, 0, 160, False),
        ),
        "shapes that do not broadcast": ("broadcast", lambda: ops.mse_loss_backward(ones(2), ones(3), ones(3), 0)),
        "an unknown reduction": ("reduction", lambda: ops.mse_loss_backward(*[ones(2)] * 3, 3)),
        "a target on the CPU": ("target", lambda: ops.mse_loss_backward(ones(2), ones(2), ones(2, device="cpu"), 1)),
        "a gradient of another shape": (
            "shape",
            lambda: ops.apply_fused_ema_adam_(
                ones(3), *(ones(2) for _ in range(4)), step, **adam, weight_decay_mode=1, bias_correction=True
            ),
        ),
    }
    if "fused_linear_online_max_sum" not in launched_on(device):
        del calls["a float32 head"]  # the chip lacks the operator
    for name, (word, call) in calls.items():
        yield name, partial(_check_refusal, call, word, device)


def _check_refusal(call: _Call, word: str, device: str) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        if word not in str(error):
            raise
        refused = type(error).__name__
    else:
        raise AssertionError("the call was not refused")
    input = torch.full((3,), 2.0, device=device, requires_grad=True)
    functional.mse_loss(input, torch.zeros(3, device=device), reduction="sum").backward()
    if input.grad is None or input.grad.tolist() != [4.0] * 3:
        raise ArithmeticError(f"after the refusal the next gradient is {input.grad}")
    return refused
