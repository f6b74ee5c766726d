"""Random collectives of NPUs, compared bit by bit with gloo's on CPUs: ``python -m tests.collectives --calls 10000``.

Every process of a group draws the same calls and its own data. gloo moves data as integers of the same size. It also
reduces, where no order of the ranks can matter: integers, whole numbers, the largest and the smallest. Other sums and
products are compared with the rule that the host NPU states: in the order of the ranks, in float32, rounded once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from host_npu import testing
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
# torch_npu casts these to int32 and back.
CAST = (torch.uint8, torch.bool)
MOVED = (*FLOATS, *INTEGERS, *CAST, torch.float64, torch.complex64)
# As what gloo moves elements of so many bytes.
_GLOO_MOVES = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_GLOO_REDUCES = (*FLOATS, torch.int8, torch.int32, torch.int64, torch.uint8)
_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}
# The last is more than the simulated ranks show one another at a time, if elements have four bytes.
_COUNTS = (*(1, 1, 2, 3, 5, 8, 31, 64, 200, 1000) * 2, 2**18 + 5)

_CALLS_OF_A_GROUP = 250


@dataclass(frozen=True)
class Drawn:
    """A call as all ranks of its group have drawn it.

    Attributes:
        number: The number of the call, from which ranks draw their data.
        name: A name of ``COLLECTIVES``.
        dtype: Of all tensors.
        op: How ranks are combined, a name of ``ReduceOp``.
        root: The rank of the group that has something others lack.
        counts: Elements that go from the rank of a row to the rank of a column.
        is_whole: Whether floating-point numbers are small and whole.
        is_awaited_later: Whether other calls are made before the result is looked at.
        on_another_stream: Whether another stream than the current one makes the data and the call.
    """

    number: int
    name: str
    dtype: torch.dtype
    op: str
    root: int
    counts: list[list[int]]
    is_whole: bool
    is_awaited_later: bool
    on_another_stream: bool

    @property
    def is_gloos(self) -> bool:
        """Whether gloo reduces to the same result, whatever order it takes."""
        is_ordered = self.dtype in FLOATS and not self.is_whole and self.op in ("SUM", "PRODUCT")
        return self.dtype in _GLOO_REDUCES and self.op != "AVG" and not is_ordered


@dataclass
class Side:
    """The same call for an NPU with hccl and for a CPU with gloo: data, room for results, and the group."""

    drawn: Drawn
    rank: int
    device: str
    group: Any
    works: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = len(self.drawn.counts)
        self.sends = self.drawn.counts[self.rank]
        self.receives = [row[self.rank] for row in self.drawn.counts]
        self.count = self.drawn.counts[0][0]
        self.is_root = self.rank == self.drawn.root
        self.root = dist.get_global_rank(self.group, self.drawn.root)
        self.options = {"group": self.group, "async_op": True}
        self._generator = torch.Generator().manual_seed(1000 * self.drawn.number + self.rank)

    @property
    def is_reference(self) -> bool:
        """Whether this is what gloo does on a CPU."""
        return self.device == "cpu"

    def given(self, count: int) -> Tensor:
        """Return elements of this rank, somewhere inside of a storage."""
        dtype = self.drawn.dtype
        if dtype in FLOATS and self.drawn.is_whole:
            values = torch.randint(-3, 4, (count + 3,), generator=self._generator).to(dtype)
        elif dtype.is_floating_point or dtype.is_complex:
            drawn = torch.complex64 if dtype.is_complex else torch.float32
            values = torch.randn(count + 3, dtype=drawn, generator=self._generator).to(dtype)
        elif dtype == torch.bool:
            values = torch.rand(count + 3, generator=self._generator) < 0.3
        else:
            bounds = torch.iinfo(dtype)
            values = torch.randint(bounds.min, bounds.max, (count + 3,), generator=self._generator, dtype=dtype)
        return self._there(values)[3:]

    def room(self, count: int) -> Tensor:
        """Return elements that a collective has to replace."""
        return self._there(torch.full((count + 1,), 1).to(self.drawn.dtype))[1:]

    def _there(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def do(self, work: Any) -> None:
        """Take note of what has been started."""
        self.works.append(work)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return the tensor as gloo moves it."""
        return tensor.view(_GLOO_MOVES[tensor.element_size()]) if self.is_reference else tensor

    def reduced(self, tensor: Tensor) -> Tensor:
        """Return the combination of all ranks' tensors, by gloo or by the rule."""
        op = _OPERATIONS[self.drawn.op]
        if self.drawn.is_gloos:
            result = tensor.clone()
            dist.all_reduce(result, getattr(ReduceOp, self.drawn.op), group=self.group)
            return result
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather([self.moved(each) for each in tensors], self.moved(tensor), group=self.group)
        wide = torch.float32 if tensor.is_floating_point() else tensor.dtype
        result = reduce(op, (each.to(wide) for each in tensors)).to(tensor.dtype)
        return result / self.size if self.drawn.op == "AVG" else result


def _all_reduce(side: Side) -> list[Tensor]:
    tensor = side.given(side.count)
    if side.is_reference:
        return [side.reduced(tensor)]
    side.do(dist.all_reduce(tensor, getattr(ReduceOp, side.drawn.op), **side.options))
    return [tensor]


def _reduce(side: Side) -> list[Tensor]:
    tensor = side.given(side.count)
    if side.is_reference:
        tensor = side.reduced(tensor)
    else:
        side.do(dist.reduce(tensor, side.root, getattr(ReduceOp, side.drawn.op), **side.options))
    return [tensor] if side.is_root else []


def _reduce_scatter(side: Side) -> list[Tensor]:
    inputs, output = [side.given(count) for count in side.sends], side.room(side.receives[0])
    if side.is_reference:
        return [side.reduced(torch.cat(inputs)).split(side.sends)[side.rank]]
    side.do(dist.reduce_scatter(output, inputs, getattr(ReduceOp, side.drawn.op), **side.options))
    return [output]


def _reduce_scatter_tensor(side: Side) -> list[Tensor]:
    input, output = side.given(sum(side.sends)), side.room(side.receives[0])
    op = getattr(ReduceOp, side.drawn.op)
    if side.is_reference:
        return [side.reduced(input).split(side.sends)[side.rank]]
    if side.drawn.name == "reduce_scatter_tensor":
        side.do(dist.reduce_scatter_tensor(output, input, op, **side.options))
    else:
        from torch_npu.distributed import reduce_scatter_tensor_uneven

        side.do(reduce_scatter_tensor_uneven(output, input, side.sends, op, **side.options))
    return [output]


def _broadcast(side: Side) -> list[Tensor]:
    tensor = side.moved(side.given(side.count))
    side.do(dist.broadcast(tensor, side.root, **side.options))
    return [tensor]


def _all_gather(side: Side) -> list[Tensor]:
    input, outputs = side.moved(side.given(side.sends[0])), [side.moved(side.room(count)) for count in side.receives]
    if side.is_reference:  # gloo takes tensors of one size only
        outputs[side.rank].copy_(input)
        for rank, output in enumerate(outputs):
            side.do(dist.broadcast(output, dist.get_global_rank(side.group, rank), **side.options))
    else:
        side.do(dist.all_gather(outputs, input, **side.options))
    return outputs


def _all_gather_equal(side: Side) -> list[Tensor]:
    input, outputs = side.moved(side.given(side.count)), [side.moved(side.room(side.count)) for _ in side.sends]
    side.do(dist.all_gather(outputs, input, **side.options))
    return outputs


def _all_gather_into_tensor(side: Side) -> list[Tensor]:
    input, output = side.moved(side.given(side.count)), side.moved(side.room(side.count * side.size))
    side.do(dist.all_gather_into_tensor(output, input, **side.options))
    return [output]


def _all_gather_into_tensor_uneven(side: Side) -> list[Tensor]:
    if side.is_reference:
        return [torch.cat(_all_gather_now(side))]
    from torch_npu.distributed import all_gather_into_tensor_uneven

    input, output = side.given(side.sends[0]), side.room(sum(side.receives))
    side.do(all_gather_into_tensor_uneven(output, input, side.receives, **side.options))
    return [output]


def _all_gather_now(side: Side) -> list[Tensor]:
    outputs = _all_gather(side)
    for work in side.works:
        work.wait()
    return outputs


def _coalesced_all_gather(side: Side) -> list[Tensor]:
    inputs = [side.moved(side.given(side.count)) for _ in range(3)]
    outputs = [side.moved(side.room(side.count * side.size)) for _ in inputs]
    if side.is_reference:
        for input, output in zip(inputs, outputs, strict=True):
            side.do(dist.all_gather_into_tensor(output, input, **side.options))
        return outputs
    device = torch.device(side.device)
    with dist._coalescing_manager(group=side.group, device=device, async_ops=True) as manager:
        for input, output in zip(inputs, outputs, strict=True):
            dist.all_gather_into_tensor(output, input, group=side.group)
    side.do(manager)
    return outputs


def _gather(side: Side) -> list[Tensor]:
    input = side.moved(side.given(side.count))
    outputs = [side.moved(side.room(side.count)) for _ in side.sends] if side.is_root else None
    side.do(dist.gather(input, outputs, side.root, **side.options))
    return outputs or []


def _scatter(side: Side) -> list[Tensor]:
    inputs = [side.moved(side.given(side.count)) for _ in side.sends] if side.is_root else None
    output = side.moved(side.room(side.count))
    side.do(dist.scatter(output, inputs, side.root, **side.options))
    return [output]


def _all_to_all_single(side: Side) -> list[Tensor]:
    input, output = side.moved(side.given(sum(side.sends))), side.moved(side.room(sum(side.receives)))
    if side.drawn.name == "all_to_all_single":
        side.do(dist.all_to_all_single(output, input, **side.options))
    elif side.is_reference or side.drawn.name == "all_to_all_single, uneven":
        side.do(dist.all_to_all_single(output, input, side.receives, side.sends, **side.options))
    else:
        from torch_npu.distributed import all_to_all_vc

        side.do(all_to_all_vc(output, input, torch.tensor(side.drawn.counts), **side.options))
    return [output]


def _all_to_all(side: Side) -> list[Tensor]:
    inputs, outputs = [side.given(count) for count in side.sends], [side.room(count) for count in side.receives]
    if side.is_reference:
        output = side.moved(torch.cat(outputs))
        side.do(
            dist.all_to_all_single(output, side.moved(torch.cat(inputs)), side.receives, side.sends, **side.options)
        )
        return list(output.split(side.receives))
    side.do(dist.all_to_all(outputs, inputs, **side.options))
    return outputs


def _messages(side: Side) -> list[Tensor]:
    """Send to every other rank, and receive from it."""
    inputs, outputs, operations = [], [], []
    for rank, (sent, received) in enumerate(zip(side.sends, side.receives, strict=True)):
        inputs.append(side.moved(side.given(sent)))
        outputs.append(side.moved(side.room(received)))
        if rank != side.rank:
            peer = dist.get_global_rank(side.group, rank)
            operations.append(dist.P2POp(dist.isend, inputs[-1], peer, side.group))
            operations.append(dist.P2POp(dist.irecv, outputs[-1], peer, side.group))
    if operations:
        side.works += dist.batch_isend_irecv(operations)
    return outputs


def _send_and_recv(side: Side) -> list[Tensor]:
    """One message from the root to the rank behind it, and one back."""
    other = (side.drawn.root + 1) % side.size
    if other == side.drawn.root or side.rank not in (other, side.drawn.root):
        return []
    peer = dist.get_global_rank(side.group, other if side.is_root else side.drawn.root)
    tensor, output = side.moved(side.given(side.count)), side.moved(side.room(side.count))
    steps = [lambda: dist.isend(tensor, peer, side.group), lambda: dist.irecv(output, peer, side.group)]
    for step in steps if side.is_root else reversed(steps):
        side.do(step())
    return [output]


def _barrier(side: Side) -> list[Tensor]:
    side.do(dist.barrier(**side.options))
    return []


@dataclass(frozen=True)
class Collective:
    """A collective, the data types that torch_npu passes on, and which counts may differ."""

    call: Callable[[Side], list[Tensor]]
    dtypes: tuple[torch.dtype, ...] = MOVED
    counts: str = "equal"


_REDUCED = (*FLOATS, *INTEGERS)
_REAL = tuple(dtype for dtype in MOVED if not dtype.is_complex)  # what torch_npu's own functions take
COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, (*_REDUCED, *CAST)),
    "reduce": Collective(_reduce, (*_REDUCED, *CAST)),
    "reduce_scatter": Collective(_reduce_scatter, _REDUCED),
    "reduce_scatter, uneven": Collective(_reduce_scatter, _REDUCED, "by receiver"),
    "reduce_scatter_tensor": Collective(_reduce_scatter_tensor, _REDUCED),
    "reduce_scatter_tensor_uneven": Collective(_reduce_scatter_tensor, _REDUCED, "by receiver"),
    "broadcast": Collective(_broadcast),
    "all_gather": Collective(_all_gather_equal),
    "all_gather, uneven": Collective(_all_gather, counts="by sender"),
    "all_gather_into_tensor": Collective(_all_gather_into_tensor),
    "all_gather_into_tensor_uneven": Collective(_all_gather_into_tensor_uneven, _REAL, "by sender"),
    "all_gather_into_tensor, coalesced": Collective(_coalesced_all_gather),
    "gather": Collective(_gather, _REAL),
    "scatter": Collective(_scatter),
    "all_to_all_single": Collective(_all_to_all_single),
    "all_to_all_single, uneven": Collective(_all_to_all_single, counts="free"),
    # torch_npu takes two empty tensors for one.
    "all_to_all_vc": Collective(_all_to_all_single, _REAL, "free, not zero"),
    "all_to_all": Collective(_all_to_all, counts="free"),
    "batch_isend_irecv": Collective(_messages, counts="free, not zero"),
    "isend and irecv": Collective(_send_and_recv),
    "barrier": Collective(_barrier),
}
if torch.__version__ < "2.10":  # whose torch_npu does not have it
    del COLLECTIVES["all_to_all_vc"]


def draw(seed: int, number: int, size: int) -> Drawn:
    """Return a call of a group of so many ranks. The first ones are one of each collective."""
    chosen = random.Random(f"{seed} {number}")
    names = list(COLLECTIVES)
    name = names[number] if number < len(names) else chosen.choice(names)
    collective = COLLECTIVES[name]
    dtype = chosen.choice(collective.dtypes)
    ops = ["SUM", "MAX", "MIN", *(["AVG"] if dtype in FLOATS and name == "all_reduce" else [])]
    ops += ["PRODUCT"] if dtype not in (torch.int16, torch.bfloat16) else []  # which the chip does not multiply
    most = chosen.choice(_COUNTS)
    drawn = [chosen.choice([most, most // 2, 1, chosen.randint(0, most)]) for _ in range(size * size)]
    entries: Callable[[int, int], int] = {
        "equal": lambda sender, receiver: most,
        "by sender": lambda sender, receiver: drawn[sender],
        "by receiver": lambda sender, receiver: drawn[receiver],
        "free": lambda sender, receiver: drawn[size * sender + receiver],
        "free, not zero": lambda sender, receiver: drawn[size * sender + receiver] or 1,
    }[collective.counts]
    return Drawn(
        number,
        name,
        dtype,
        "SUM" if dtype == torch.bool else chosen.choice(ops),
        chosen.randrange(size),
        [[entries(sender, receiver) for receiver in range(size)] for sender in range(size)],
        chosen.random() < 0.5,
        chosen.random() < 0.5,
        chosen.random() < 0.3,
    )


def _groups(world_size: int) -> list[tuple[list[int], Any, Any]]:
    """Return the ranks, the group of NPUs and the group of CPUs of some subsets."""
    subsets = [list(range(world_size)), *([[0, world_size - 1], [1, 2]] if world_size > 2 else [])]
    return [(ranks, dist.new_group(ranks, backend="hccl"), dist.new_group(ranks, backend="gloo")) for ranks in subsets]


def compare(device: str, seed: int, calls: int) -> tuple[Counter[str], list[str]]:
    """Make calls as one of the processes; return how many of what there were, and where results differ from gloo's."""
    groups = _groups(dist.get_world_size())
    made: Counter[str] = Counter()
    differences: list[str] = []
    pending: list[tuple[Side, list[Tensor], list[Tensor]]] = []
    stream = torch.npu.Stream()
    for number in range(calls):
        ranks, of_npus, of_cpus = groups[random.Random(f"{seed} group {number}").randrange(len(groups))]
        if number < len(COLLECTIVES):
            ranks, of_npus, of_cpus = groups[0]
        if dist.get_rank() not in ranks:
            continue
        drawn = draw(seed, number, len(ranks))
        rank = ranks.index(dist.get_rank())
        reference, side = Side(drawn, rank, "cpu", of_cpus), Side(drawn, rank, device, of_npus)
        expected = COLLECTIVES[drawn.name].call(reference)
        for work in reference.works:
            work.wait()
        with torch.npu.stream(stream if drawn.on_another_stream else torch.npu.current_stream()):
            results = COLLECTIVES[drawn.name].call(side)
            made[drawn.name] += 1
            pending.append((side, results, expected))
            if not drawn.is_awaited_later:
                differences += _differences(pending)
                pending.clear()
    return made, differences + list(_differences(pending))


def _differences(pending: list[tuple[Side, list[Tensor], list[Tensor]]]) -> Iterator[str]:
    for side, results, expected in pending:
        for work in side.works:
            if work is not None:
                work.wait()
        bits = [_bits(tensors) for tensors in (results, expected)]
        if len(results) != len(expected) or not all(map(torch.equal, *bits)):
            yield f"rank {side.rank}: {side.drawn}: {results} where gloo has {expected}"


def _bits(tensors: list[Tensor]) -> list[Tensor]:
    copies = [tensor.cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return [copy.view(torch.uint8) for copy in copies]


def main() -> int:
    """Run what the command line asks for; return 1 if results differ."""
    parser = argparse.ArgumentParser(description="Compare collectives of simulated NPUs with gloo's.")
    parser.add_argument("--calls", type=int, default=10000, help="calls in all (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Several ranks on a device, and one rank on each.
    arrangements = itertools.cycle(itertools.product((1, 2, 3, 4), (1, 4)))
    total: Counter[str] = Counter()
    failed = 0
    for index, start in enumerate(range(0, arguments.calls, _CALLS_OF_A_GROUP)):
        (world_size, devices), calls = next(arrangements), min(_CALLS_OF_A_GROUP, arguments.calls - start)
        found = testing.run(compare, world_size, arguments.seed + index, calls, device="npu", devices=devices)
        failed += sum(len(differences) for _, differences in found)
        total += Counter({name: max(made[name] for made, _ in found) for name in COLLECTIVES})
        print(f"{world_size} ranks, {devices} devices: {calls} calls", flush=True)
        for difference in itertools.chain.from_iterable(differences[:3] for _, differences in found):
            print(difference[:2000])
    print("| collective | calls |\n|---|---|")
    for name, calls in total.items():
        print(f"| {name} | {calls:,} |")
    print(f"{sum(total.values())} calls, {failed} results that differ")
    return 1 if failed else 0


if __name__ == "__main__":
    from tests import collectives  # under the name that other processes know

    sys.exit(collectives.main())
