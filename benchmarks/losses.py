"""Forward and backward of losses against torch's own: ``python -m benchmarks.losses [mse_loss ...]``.

A loss is a function whose first arguments are an input and a target of one shape; a new one is found by itself. The
limit is a copy of as many bytes as two passes must move: the forward pass reads input and target, the backward pass
reads them again and writes the gradient.
"""

import inspect
from argparse import Namespace

from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import nn

import torch

from benchmarks._harness import (
    LIMIT,
    OURS,
    TORCH,
    compare,
    copy_of,
    doublings,
    forward_and_backward,
    parser,
    run,
    with_compiled,
)
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
    rows = []
    for name in options.losses:
        theirs = getattr(torch.nn.functional, name)
        compiled = with_compiled(theirs, options)
        for dtype in (torch.float32, torch.bfloat16):
            for elements in doublings(LARGEST, options.quick):
                input, target = torch.rand(elements).to(dtype).requires_grad_(), torch.rand(elements).to(dtype)
                functions = {TORCH: theirs, OURS: getattr(ours, name), **compiled}
                cases = {by: forward_and_backward(function, input, target) for by, function in functions.items()}
                cases[f"{LIMIT}copy of as many bytes"] = copy_of(5 * elements * dtype.itemsize)
                rows += compare(
                    cases,
                    options.rounds,
                    least_bytes=elements * dtype.itemsize,
                    operator=name,
                    configuration="forward and backward",
                    device="cpu",
                    dtype=str(dtype).removeprefix("torch."),
                    variable="elements",
                    size=elements,
                )
    return rows


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("losses", nargs="*", default=LOSSES, help="names (default: all)")
    run("losses", measure, arguments.parse_args(), rounds=11)
