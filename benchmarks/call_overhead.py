"""What a training loop pays for a call: ``python -m benchmarks.call_overhead [--device npu]``.

Forward and backward of every drop-in, and an optimizer step, against torch's own on the same device, in one process and
one thread. On an NPU, torch's are torch_npu's, whose autograd is C++. Without an NPU, the host NPU is used; both sides
then call the same operators.
"""

import argparse
import copy
from collections.abc import Callable, Iterator

import torch_aclnn_ops
from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor

from benchmarks._harness import OURS, TORCH, Call, compare, parser, run, use_npu
from benchmarks._results import Row
from benchmarks.drop_ins import LOSSES
from benchmarks.linear_cross_entropy import naive

ELEMENTS, _DIM = 128, 16  # of losses and parameters; of the embedding
_CALLS = 100  # per round, fewer than torch_npu's queue holds
_DECAY = 0.999
Pair = tuple[Call, Call]  # the same call by torch and by this package


def pairs(device: str) -> Iterator[tuple[str, Pair]]:
    """Yield the names of the calls, and each call by both."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(device)

    def both(name: str, trained: Tensor, *arguments: Tensor, grad: Tensor | None = None) -> tuple[str, Pair]:
        modules = (torch.nn.functional, ours)
        return name, tuple(_backward(getattr(it, name), trained, *arguments, grad=grad) for it in modules)

    input = rand(ELEMENTS).requires_grad_()
    for name in LOSSES:
        yield both(name, input, input, rand(ELEMENTS))
    table, indices = rand(20, _DIM).requires_grad_(), torch.randint(20, (ELEMENTS // _DIM,), generator=generator)
    yield both("embedding", table, indices.to(device), table, grad=rand(len(indices), _DIM))
    yield "FusedEmaAdam.step", _steps(rand(ELEMENTS), rand(ELEMENTS))
    yield "linear_cross_entropy 8x16x200", _linear_cross_entropies(rand, device)


def _backward(function: Callable[..., Tensor], trained: Tensor, *arguments: Tensor, grad: Tensor | None = None) -> Call:
    def call() -> None:
        function(*arguments).backward(grad)
        trained.grad = None

    return call


def _linear_cross_entropies(rand: Callable[..., Tensor], device: str) -> Pair:
    input, head = rand(8, 16).requires_grad_(), rand(200, 16).requires_grad_()
    target = torch.arange(8, device=device)
    return tuple(_backward(loss, head, input, head, target) for loss in (naive, ours.linear_cross_entropy))


def _steps(weight: Tensor, grad: Tensor) -> Pair:
    weights = [torch.nn.Parameter(copy.deepcopy(weight)) for _ in range(2)]
    for one in weights:
        one.grad = grad.clone()
    adam = torch.optim.AdamW(weights[:1], fused=True if weight.is_cpu else None)
    average = weights[0].detach().clone()

    def step_and_average() -> None:
        adam.step()
        average.lerp_(weights[0].detach(), 1 - _DECAY)

    return step_and_average, torch_aclnn_ops.optim.FusedEmaAdam(weights[1:], ema_decay=_DECAY).step


def measure(options: argparse.Namespace) -> list[Row]:
    """Compare every call."""
    rows = []
    waiting = {"wait": torch.npu.synchronize} if options.device == "npu" else {}
    for name, pair in pairs(options.device):
        columns = {"configuration": "forward and backward", "variable": "elements", "size": ELEMENTS}
        if name.startswith("FusedEmaAdam"):
            columns["configuration"] = "one parameter"
        columns |= {"operator": name, "device": options.device}
        rows += compare(dict(zip((TORCH, OURS), pair, strict=True)), options.rounds, calls=_CALLS, **waiting, **columns)
    return rows


if __name__ == "__main__":
    parser = parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    options = parser.parse_args()
    use_npu(options.device)
    run("call_overhead" if options.device == "cpu" else "call_overhead_npu", measure, options, rounds=40)
