"""What a training loop pays for a call: ``python -m benchmarks.call_overhead [--device npu]``.

Forward and backward of every drop-in and module, and a step of the optimizer, against torch's own on the same device,
in one process and one thread. On an NPU these are torch_npu's, whose autograd is C++. Without an NPU the host NPU
stands in for it; both sides call the same operators there.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch_aclnn_ops
from torch_aclnn_ops import functional as ours

import torch
from torch import Tensor

from benchmarks._harness import OURS, TORCH, Call, compare, parser, run, use_npu
from benchmarks._results import Row
from benchmarks.losses import LOSSES, MODULES

ELEMENTS = tuple(128 * 8**power for power in range(5))
_DIM = 16  # of the embedding
_DECAY = 0.999
Pair = tuple[Call, Call]  # the same call by torch and by this package


def pairs(device: str, elements: int) -> Iterator[tuple[str, Callable[[], Pair]]]:
    """Yield the names of the calls of one size, and what makes them."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(device)

    def losses(theirs: Callable[..., Tensor], mine: Callable[..., Tensor]) -> Pair:
        input, target = rand(elements).requires_grad_(), rand(elements)
        return _backward(theirs, input, input, target), _backward(mine, input, input, target)

    def tables(theirs: Callable[..., Tensor], mine: Callable[..., Tensor], weight: Tensor) -> Pair:
        indices = torch.randint(weight.shape[0], (max(elements // _DIM, 1),), generator=generator).to(device)
        grad = rand(indices.shape[0], _DIM)
        return _backward(theirs, weight, indices, grad=grad), _backward(mine, weight, indices, grad=grad)

    def table() -> Tensor:
        return rand(max(elements // 64, 20), _DIM).requires_grad_()

    def functions() -> Pair:
        weight = table()
        return tables(
            lambda indices: torch.nn.functional.embedding(indices, weight),
            lambda indices: ours.embedding(indices, weight),
            weight,
        )

    def modules() -> Pair:
        theirs = torch.nn.Embedding.from_pretrained(table().detach(), freeze=False)
        mine = torch_aclnn_ops.nn.Embedding.from_pretrained(theirs.weight.detach(), freeze=False)
        mine.weight = theirs.weight
        return tables(theirs, mine, theirs.weight)

    for name in LOSSES:
        yield name, partial(losses, getattr(torch.nn.functional, name), getattr(ours, name))
    for name in MODULES:
        yield name, partial(losses, getattr(torch.nn, name)(), getattr(torch_aclnn_ops.nn, name)())
    yield "embedding", functions
    yield "Embedding", modules
    yield "FusedEmaAdam.step", lambda: _steps(rand(elements), rand(elements))
    if elements == ELEMENTS[0]:
        yield "linear_cross_entropy 8x16x200", lambda: _linear_cross_entropies(rand, device)


def _backward(function: Callable[..., Tensor], trained: Tensor, *arguments: Tensor, grad: Tensor | None = None) -> Call:
    def call() -> None:
        function(*arguments).backward(grad)
        trained.grad = None

    return call


def _linear_cross_entropies(rand: Callable[..., Tensor], device: str) -> Pair:
    input, head = rand(8, 16).requires_grad_(), rand(200, 16).requires_grad_()
    target = torch.arange(8, device=device)

    def theirs(input: Tensor, head: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, head), target)

    return tuple(_backward(loss, head, input, head, target) for loss in (theirs, ours.linear_cross_entropy))


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
    """Compare every call for every size."""
    rows = []
    wait = torch.npu.synchronize if options.device == "npu" else None
    for elements in options.elements[:3] if options.quick else options.elements:
        # A few milliseconds a round, and fewer calls than torch_npu's queue has places.
        calls = max(2, min(100, 2**18 // elements))
        for name, make in pairs(options.device, elements):
            cases = dict(zip((TORCH, OURS), make(), strict=True))
            columns = {"operator": name, "configuration": "forward and backward", "device": options.device}
            if name.startswith("FusedEmaAdam"):
                columns["configuration"] = "one parameter"
            columns |= {"dtype": "float32", "variable": "elements", "size": elements}
            rows += compare(cases, options.rounds, wait, calls=calls, **columns)
    return rows


if __name__ == "__main__":
    parser = parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    parser.add_argument("--elements", type=int, nargs="*", default=ELEMENTS, help="sizes")
    options = parser.parse_args()
    use_npu(options.device)
    run("call_overhead" if options.device == "cpu" else "call_overhead_npu", measure, options, rounds=40)
