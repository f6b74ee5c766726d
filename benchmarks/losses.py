"""Forward and backward of losses against torch's own: ``python -m benchmarks.losses [mse_loss ...]``.

A loss is a function whose first arguments are an input and a target of one shape; a new one is found by itself.
"""

import inspect
import sys
from collections.abc import Iterable

from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import nn

import torch

from benchmarks._harness import compare, forward_and_backward, print_table

_ARGUMENTS = ["input", "target"]
LOSSES = [
    name
    for name in ours.__all__
    if name.islower() and list(inspect.signature(getattr(ours, name)).parameters)[:2] == _ARGUMENTS
]
MODULES = [
    name for name in nn.__all__ if list(inspect.signature(getattr(nn, name).forward).parameters)[1:] == _ARGUMENTS
]


def main(losses: Iterable[str], elements: int = 2**24, rounds: int = 15) -> None:
    """Print a table for float32 and bfloat16 vectors."""
    torch.set_num_threads(2)
    rows = []
    for name in losses:
        for dtype in (torch.float32, torch.bfloat16):
            input, target = torch.rand(elements).to(dtype).requires_grad_(), torch.rand(elements).to(dtype)
            cases = {
                by: forward_and_backward(getattr(module, name), input, target)
                for by, module in (("torch", torch.nn.functional), ("torch_aclnn_ops", ours))
            }
            rows += compare(f"{name}, {elements} {dtype}", cases, rounds)
    print_table(rows)


if __name__ == "__main__":
    main(sys.argv[1:] or LOSSES)
