"""How far a call goes through this package: ``python -m benchmarks.call_path``.

Counts the Python functions, calls and files of one eager forward and backward of every drop-in, of this package alone.
``--list`` prints the calls of one of them in order.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch_aclnn_ops
from torch_aclnn_ops import functional as F
from torch_aclnn_ops._drop_ins import DROP_INS

import torch

from benchmarks._harness import MEASURED, OURS, parser, run
from benchmarks._results import Row
from benchmarks.losses import LOSSES

PACKAGE = Path(torch_aclnn_ops.__file__).parent


def cases() -> dict[str, Callable[[], torch.Tensor]]:
    """Return a function that returns a scalar loss, for each drop-in."""
    generator = torch.Generator().manual_seed(0)
    input, target = (torch.rand(8, 16, generator=generator) for _ in range(2))
    weight, classes = torch.rand(200, 16, generator=generator), torch.randint(200, (8,), generator=generator)
    for tensor in (input, weight):
        tensor.requires_grad_()
    given = {"embedding": (classes, weight), "linear_cross_entropy": (input, weight, classes)}
    arguments = {name: given.get(name, (input, target) if name in LOSSES else (input,)) for name in DROP_INS}
    return {name: lambda name=name: getattr(F, name)(*arguments[name]).sum() for name in DROP_INS}


def calls_of(function: Callable[[], torch.Tensor]) -> list[tuple[str, str]]:
    """Return the file and name of each function of this package that a forward and a backward call, in order."""
    calls: list[tuple[str, str]] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            # Python 3.10 has no qualified names of code.
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            calls.append((str(path.relative_to(PACKAGE)), name))

    function().backward()  # what is done once is done
    sys.setprofile(record)
    try:
        function().backward()
    finally:
        sys.setprofile(None)
    return calls


def measure(_: argparse.Namespace) -> list[Row]:
    """Count for each drop-in."""
    found = {name: calls_of(function) for name, function in cases().items()}
    return [
        {
            "operator": name,
            "configuration": "forward and backward",
            "by": OURS,
            "status": MEASURED,
            "functions": len(set(calls)),
            "calls": len(calls),
            "files": len({file for file, _ in calls}),
        }
        for name, calls in found.items()
    ]


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--list", choices=cases(), help="print the calls of this drop-in")
    options = arguments.parse_args()
    if options.list is None:
        run("call_path", measure, options)
    for file, name in calls_of(cases()[options.list]) if options.list else ():
        print(f"{file}: {name}")
