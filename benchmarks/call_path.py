"""The functions of this package that a drop-in calls: ``python -m benchmarks.call_path mse_loss``.

Prints them in order for one eager forward and backward pass; for a linear cross entropy, in two chunks.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch_aclnn_ops
from torch_aclnn_ops import functional as F
from torch_aclnn_ops._checks import DROP_INS

import torch

from benchmarks.drop_ins import LOSSES

PACKAGE = Path(torch_aclnn_ops.__file__).parent


def loss_of(name: str) -> Callable[[], torch.Tensor]:
    """Return a function that returns a scalar loss of a drop-in."""
    generator = torch.Generator().manual_seed(0)
    input, target = (torch.rand(8, 16, generator=generator) for _ in range(2))
    weight, classes = torch.rand(200, 16, generator=generator), torch.randint(200, (8,), generator=generator)
    for tensor in (input, weight):
        tensor.requires_grad_()
    if name == "linear_cross_entropy":
        return lambda: F.linear_cross_entropy(input, weight, classes, chunk_size=4)
    arguments = {"embedding": (classes, weight)}.get(name, (input, target) if name in LOSSES else (input,))
    return lambda: getattr(F, name)(*arguments).sum()


def print_calls(function: Callable[[], torch.Tensor]) -> None:
    """Print the file and name of each function of this package that is called in a forward and backward pass."""

    def show(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            # Python 3.10 has no qualified names of code objects.
            print(f"{path.relative_to(PACKAGE)}: {getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}")

    function().backward()  # one-time initialization
    sys.setprofile(show)
    try:
        function().backward()
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=DROP_INS)
    print_calls(loss_of(parser.parse_args().name))
