"""Forward and backward of binary_cross_entropy against torch's own: ``python -m benchmarks.binary_cross_entropy``."""

from torch_aclnn_ops import functional as ours

import torch

from benchmarks._harness import compare, forward_and_backward, print_table


def main(elements: int = 2**24, rounds: int = 15) -> None:
    """Print a table for float32 and bfloat16 vectors."""
    torch.set_num_threads(2)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        input, target = torch.rand(elements).to(dtype).requires_grad_(), torch.rand(elements).to(dtype)
        cases = {
            "torch": forward_and_backward(torch.nn.functional.binary_cross_entropy, input, target),
            "torch_aclnn_ops": forward_and_backward(ours.binary_cross_entropy, input, target),
        }
        rows += compare(f"binary_cross_entropy, {elements} {dtype}", cases, rounds)
    print_table(rows)


if __name__ == "__main__":
    main()
