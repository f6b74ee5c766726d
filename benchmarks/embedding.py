"""Forward and backward of embedding against torch's own: ``python -m benchmarks.embedding``.

The limit is a copy of as many bytes as must be moved: a row is read and written for each index, its gradient is read
and added to a row, and the gradient of the whole table is written.
"""

from argparse import Namespace

from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor

from benchmarks._harness import LIMIT, OURS, TORCH, Call, compare, copy_of, doublings, parser, run, with_compiled
from benchmarks._results import Row

DIM, VOCABULARY, LARGEST = 512, 32000, 2**15


def measure(options: Namespace) -> list[Row]:
    """Compare for float32 and bfloat16 tables."""
    rows = []
    compiled = with_compiled(torch.nn.functional.embedding, options)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(VOCABULARY, DIM).to(dtype).requires_grad_()
        for number in doublings(LARGEST, options.quick):
            indices = torch.randint(VOCABULARY, (number,))
            functions = {
                TORCH: torch.nn.functional.embedding,
                OURS: ours.embedding,
                **compiled,
            }
            cases = {by: _forward_and_backward(function, indices, weight) for by, function in functions.items()}
            cases[f"{LIMIT}copy of as many bytes"] = copy_of((5 * number + VOCABULARY) * DIM * dtype.itemsize)
            rows += compare(
                cases,
                options.rounds,
                least_bytes=VOCABULARY * DIM * dtype.itemsize,
                operator="embedding",
                configuration=f"of a table {VOCABULARY} x {DIM}, forward and backward",
                device="cpu",
                dtype=str(dtype).removeprefix("torch."),
                variable="indices",
                size=number,
            )
    return rows


def _forward_and_backward(function: object, indices: Tensor, weight: Tensor) -> Call:
    grad_output = torch.randn(*indices.shape, weight.shape[1]).to(weight.dtype)

    def call() -> None:
        torch.autograd.grad(function(indices, weight), weight, grad_output)

    return call


if __name__ == "__main__":
    run("embedding", measure, parser(__doc__).parse_args(), rounds=11)
