"""Forward and backward of embedding against torch's own: ``python -m benchmarks.embedding``.

The limit is a copy of as many bytes as must be moved: a row is read and written for each index, its gradient is read
and added to a row, and the gradient of the whole table is written.
"""

from argparse import Namespace
from collections.abc import Callable

# torch_aclnn_ops goes before torch, see torch_aclnn_ops/_torch_npu.py.
from benchmarks._harness import Call, against_torch, parser, run  # isort: skip

import torch
from torch import Tensor

from benchmarks._results import Row

DIM, VOCABULARY, LARGEST = 512, 32000, 2**15


def measure(options: Namespace) -> list[Row]:
    """Compare for float32 and bfloat16 tables."""
    return against_torch(
        options,
        "embedding",
        LARGEST,
        _prepare,
        lambda _: VOCABULARY * DIM,
        lambda number: (5 * number + VOCABULARY) * DIM,
        configuration=f"of a table {VOCABULARY} x {DIM}, forward and backward",
        variable="indices",
    )


def _prepare(dtype: torch.dtype, number: int) -> Callable[[Callable[..., Tensor]], Call]:
    weight, indices = torch.randn(VOCABULARY, DIM).to(dtype).requires_grad_(), torch.randint(VOCABULARY, (number,))
    grad = torch.randn(number, DIM).to(dtype)
    return lambda function: lambda: torch.autograd.grad(function(indices, weight), weight, grad)


if __name__ == "__main__":
    run("embedding", measure, parser(__doc__).parse_args(), rounds=11)
