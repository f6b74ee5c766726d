"""Forward and backward of losses against torch's own: ``python -m benchmarks.losses [mse_loss ...]``.

A loss is a function whose first arguments are an input and a target of one shape; a new one is found by itself. The
limit is a copy of as many bytes as two passes must move: the forward pass reads input and target, the backward pass
reads them again and writes the gradient.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable

from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import nn

import torch
from torch import Tensor

from benchmarks._harness import Call, against_torch, forward_and_backward, parser, run
from benchmarks._results import Row

_ARGUMENTS = ["input", "target"]
LOSSES = [
    name
    for name in ours.__all__
    if name.islower() and list(inspect.signature(getattr(ours, name)).parameters)[:2] == _ARGUMENTS
]
MODULES = [
    name for name in nn.__all__ if list(inspect.signature(getattr(nn, name).forward).parameters)[1:] == _ARGUMENTS
]
LARGEST = 2**24


def measure(options: Namespace) -> list[Row]:
    """Compare every loss for float32 and bfloat16 vectors."""
    columns = {"configuration": "forward and backward", "variable": "elements"}
    rows = []
    for name in options.losses:
        rows += against_torch(options, name, LARGEST, _prepare, lambda size: size, lambda size: 5 * size, **columns)
    return rows


def _prepare(dtype: torch.dtype, size: int) -> Callable[[Callable[..., Tensor]], Call]:
    input, target = torch.rand(size).to(dtype).requires_grad_(), torch.rand(size).to(dtype)
    return lambda function: forward_and_backward(function, input, target)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("losses", nargs="*", default=LOSSES, help="names (default: all)")
    run("losses", measure, arguments.parse_args(), rounds=11)
