"""Forward and backward of drop-ins with many elements against torch's functions: ``python -m benchmarks.drop_ins``.

A loss is a function whose first arguments are an input and a target of one shape; new losses are found automatically.
The limit is a copy of the bytes that must be moved. The two passes of a loss read input and target twice and write the
gradient. Those of an embedding read and write a row for each index, read its gradient and add it to a row, and write
the gradient of the whole table.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable

from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor
from torch.nn import functional as theirs

from benchmarks._harness import LIMIT, OURS, TORCH, Call, compare, copy_of, parser, run
from benchmarks._results import Row

LOSSES = [
    name
    for name in ours.__all__
    if name.islower() and list(inspect.signature(getattr(ours, name)).parameters)[:2] == ["input", "target"]
]
DIM, VOCABULARY = 512, 32000


def measure(options: Namespace) -> list[Row]:
    """Compare every loss of float32 and bfloat16 vectors, and the embedding of tables in these dtypes."""
    rows = []
    size, number = (2**18, 2**9) if options.quick else (2**24, 2**15)
    for dtype in (torch.float32, torch.bfloat16):
        input, target = torch.rand(size).to(dtype).requires_grad_(), torch.rand(size).to(dtype)
        made = f"{size:,} elements, forward and backward"
        for name in LOSSES:
            call = _caller(input, input, target, grad=torch.ones((), dtype=dtype))
            rows += _against_torch(options, name, call, 5 * size, dtype, made)
        weight, indices = torch.randn(VOCABULARY, DIM).to(dtype).requires_grad_(), torch.randint(VOCABULARY, (number,))
        call = _caller(weight, indices, weight, grad=torch.randn(number, DIM).to(dtype))
        made = f"{number:,} indices, of a table {VOCABULARY} x {DIM}, forward and backward"
        rows += _against_torch(options, "embedding", call, (5 * number + VOCABULARY) * DIM, dtype, made)
    return rows


def _caller(trained: Tensor, *arguments: Tensor, grad: Tensor) -> Callable[[Callable[..., Tensor]], Call]:
    return lambda function: lambda: torch.autograd.grad(function(*arguments), trained, grad)


def _against_torch(
    options: Namespace, name: str, call: Callable[..., Call], moved: int, dtype: torch.dtype, configuration: str
) -> list[Row]:
    cases = {TORCH: call(getattr(theirs, name)), OURS: call(getattr(ours, name))}
    cases[f"{LIMIT}copy of as many bytes"] = copy_of(moved * dtype.itemsize)
    columns = {"operator": name, "configuration": configuration, "dtype": str(dtype).removeprefix("torch.")}
    return compare(cases, options.rounds, least_bytes=0, **columns)


if __name__ == "__main__":
    run("drop_ins", measure, parser(__doc__).parse_args(), rounds=11)
