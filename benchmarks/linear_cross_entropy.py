"""Forward and backward of linear_cross_entropy against torch's own: ``python -m benchmarks.linear_cross_entropy``."""

from functools import partial

from torch_aclnn_ops import functional as ours

import torch
from torch.nn import LinearCrossEntropyOptions

from benchmarks._harness import compare, forward_and_backward, print_table


def main(rows: int = 2048, features: int = 512, classes: int = 32000, rounds: int = 5) -> None:
    """Print a table for float32 and bfloat16; the last row shows what the label smoothing costs."""
    torch.set_num_threads(2)
    theirs, options = torch.nn.functional.linear_cross_entropy, LinearCrossEntropyOptions
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        input = (torch.randn(rows, features)).to(dtype).requires_grad_()
        head = (torch.randn(classes, features) / features**0.5).to(dtype).requires_grad_()
        target = torch.randint(classes, (rows,))
        in_chunks = options(batch_chunk_size=256, chunking_method=None)
        functions = {
            "torch, options=None": theirs,
            "torch, batch_chunk_size=256": partial(theirs, options=in_chunks),
            "torch_aclnn_ops": ours.linear_cross_entropy,
            "torch_aclnn_ops, label_smoothing=0.1": partial(ours.linear_cross_entropy, label_smoothing=0.1),
        }
        cases = {name: forward_and_backward(function, input, head, target) for name, function in functions.items()}
        lines += compare(f"linear_cross_entropy, {rows} x {features} x {classes} {dtype}", cases, rounds)
    print_table(lines)


if __name__ == "__main__":
    main()
