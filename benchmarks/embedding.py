"""Forward and backward of embedding against torch's own: ``python -m benchmarks.embedding``."""

from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor

from benchmarks._harness import Call, compare, print_table


def main(elements: int = 2**24, dim: int = 512, vocabulary: int = 32000, rounds: int = 15) -> None:
    """Print a table for float32 and bfloat16 tables and ``elements`` looked-up elements."""
    torch.set_num_threads(2)
    rows = []
    indices = torch.randint(vocabulary, (elements // dim,))
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(vocabulary, dim).to(dtype).requires_grad_()
        cases = {
            "torch": _forward_and_backward(torch.nn.functional.embedding, indices, weight),
            "torch_aclnn_ops": _forward_and_backward(ours.embedding, indices, weight),
        }
        rows += compare(f"embedding, {elements} {dtype} of {vocabulary} x {dim}", cases, rounds)
    print_table(rows)


def _forward_and_backward(function: object, indices: Tensor, weight: Tensor) -> Call:
    grad_output = torch.randn(*indices.shape, weight.shape[1]).to(weight.dtype)

    def call() -> None:
        torch.autograd.grad(function(indices, weight), weight, grad_output)

    return call


if __name__ == "__main__":
    main()
