"""Random collectives of NPUs, compared bit by bit with their definition: ``python -m tests.collectives --calls 10000``.

Every process of a group draws the same calls and the data of all ranks, so it knows the expected results. Sums and
products follow the rule that the host NPU documents: in the order of the ranks, in float32, rounded once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}
# The last count exceeds a window of the shared memory for elements of four bytes.
_COUNTS = (*(1, 1, 2, 3, 5, 8, 31, 64, 200, 1000) * 2, 2**18 + 5)

_CALLS_OF_A_GROUP = 250


@dataclass(frozen=True)
class Drawn:
    """A call as drawn by all ranks of its group.

    Attributes:
        number: The number of the call, which determines the data.
        name: A key of ``COLLECTIVES``.
        dtype: The dtype of all tensors.
        op: The reduction, a name of ``ReduceOp``.
        root: The rank of the group that has a special role.
        counts: The number of elements from the rank of a row to the rank of a column.
        is_whole: Whether floating-point numbers are small integers.
        is_awaited_later: Whether other calls are made before the result is read.
        on_another_stream: Whether data and call are on another stream than the current one.
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


# Tensors that a call changes, and their expected values.
Results = list[tuple[Tensor, Tensor]]


class Call:
    """One rank's call, and the data of all ranks."""

    def __init__(self, drawn: Drawn, rank: int, device: str, group: Any) -> None:
        self.drawn, self.rank, self._device, self.group = drawn, rank, device, group
        self.ranks = range(len(drawn.counts))
        self.sends = drawn.counts[rank]
        self.receives = [row[rank] for row in drawn.counts]
        self.is_root = rank == drawn.root
        self.root = dist.get_global_rank(group, drawn.root)
        self.op = getattr(ReduceOp, drawn.op)
        self.options = {"group": group, "async_op": True}
        # torch_npu's work for an all_gather with an empty tensor makes no other stream wait.
        self.stream = torch.npu.current_stream()
        self.works: list[Any] = []

    def data(self, sender: int, receiver: int = 0) -> Tensor:
        """Return the data sent from one rank to another."""
        dtype, count = self.drawn.dtype, self.drawn.counts[sender][receiver]
        generator = torch.Generator().manual_seed(64 * self.drawn.number + 8 * sender + receiver)
        if dtype in FLOATS and self.drawn.is_whole:
            return torch.randint(-3, 4, (count,), generator=generator).to(dtype)
        if dtype.is_floating_point or dtype.is_complex:
            drawn = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(count, dtype=drawn, generator=generator).to(dtype)
        if dtype == torch.bool:
            return torch.rand(count, generator=generator) < 0.3
        bounds = torch.iinfo(dtype)
        return torch.randint(bounds.min, bounds.max, (count,), generator=generator, dtype=dtype)

    def mine(self, receiver: int = 0) -> Tensor:
        """Return this rank's data for another rank, on the device."""
        return self.there(self.data(self.rank, receiver))

    def there(self, values: Tensor) -> Tensor:
        """Return values on the device, at an offset in a storage."""
        storage = torch.ones(len(values) + 3, dtype=self.drawn.dtype)
        storage[3:] = values
        return storage.to(self._device)[3:]

    def room(self, count: int) -> Tensor:
        """Return elements that a collective must overwrite."""
        return self.there(torch.ones(count, dtype=self.drawn.dtype))

    def combined(self, receiver: int = 0) -> Tensor:
        """Return the reduction of what all ranks send to one rank."""
        tensors = [self.data(sender, receiver) for sender in self.ranks]
        wide = torch.float32 if self.drawn.dtype.is_floating_point else self.drawn.dtype
        result = reduce(_OPERATIONS[self.drawn.op], (each.to(wide) for each in tensors)).to(self.drawn.dtype)
        return result / len(tensors) if self.drawn.op == "AVG" else result


def _all_reduce(call: Call) -> Results:
    tensor = call.mine()
    call.works.append(dist.all_reduce(tensor, call.op, **call.options))
    return [(tensor, call.combined())]


def _reduce(call: Call) -> Results:
    tensor = call.mine()
    call.works.append(dist.reduce(tensor, call.root, call.op, **call.options))
    return [(tensor, call.combined())] if call.is_root else []


def _reduce_scatter(call: Call) -> Results:
    inputs, output = [call.mine(rank) for rank in call.ranks], call.room(call.receives[0])
    call.works.append(dist.reduce_scatter(output, inputs, call.op, **call.options))
    return [(output, call.combined(call.rank))]


def _reduce_scatter_tensor(call: Call) -> Results:
    input, output = _joined(call), call.room(call.receives[0])
    if call.drawn.name == "reduce_scatter_tensor":
        call.works.append(dist.reduce_scatter_tensor(output, input, call.op, **call.options))
    else:
        from torch_npu.distributed import reduce_scatter_tensor_uneven

        call.works.append(reduce_scatter_tensor_uneven(output, input, call.sends, call.op, **call.options))
    return [(output, call.combined(call.rank))]


def _joined(call: Call) -> Tensor:
    """Return this rank's data for all ranks, concatenated."""
    return call.there(torch.cat([call.data(call.rank, rank) for rank in call.ranks]))


def _broadcast(call: Call) -> Results:
    tensor = call.mine()
    call.works.append(dist.broadcast(tensor, call.root, **call.options))
    return [(tensor, call.data(call.drawn.root))]


def _all_gather(call: Call) -> Results:
    outputs = [call.room(count) for count in call.receives]
    call.works.append(dist.all_gather(outputs, call.mine(), **call.options))
    return [(output, call.data(rank)) for rank, output in enumerate(outputs)]


def _all_gather_into_tensor(call: Call) -> Results:
    output = call.room(sum(call.receives))
    if call.drawn.name == "all_gather_into_tensor":
        call.works.append(dist.all_gather_into_tensor(output, call.mine(), **call.options))
    else:
        from torch_npu.distributed import all_gather_into_tensor_uneven

        call.works.append(all_gather_into_tensor_uneven(output, call.mine(), call.receives, **call.options))
    return [(output, torch.cat([call.data(rank) for rank in call.ranks]))]


def _coalesced_all_gather(call: Call) -> Results:
    # One output per rank.
    outputs = [call.room(sum(call.receives)) for _ in call.ranks]
    with dist._coalescing_manager(group=call.group, device=torch.device("npu"), async_ops=True) as manager:
        for part, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, call.mine(part), group=call.group)
    call.works.append(manager)
    return [(output, torch.cat([call.data(rank, part) for rank in call.ranks])) for part, output in enumerate(outputs)]


def _gather(call: Call) -> Results:
    outputs = [call.room(count) for count in call.receives] if call.is_root else None
    call.works.append(dist.gather(call.mine(), outputs, call.root, **call.options))
    return [(output, call.data(rank)) for rank, output in enumerate(outputs or [])]


def _scatter(call: Call) -> Results:
    inputs = [call.mine(rank) for rank in call.ranks] if call.is_root else None
    output = call.room(call.receives[0])
    call.works.append(dist.scatter(output, inputs, call.root, **call.options))
    return [(output, call.data(call.drawn.root, call.rank))]


def _all_to_all_single(call: Call) -> Results:
    input, output = _joined(call), call.room(sum(call.receives))
    if call.drawn.name == "all_to_all_single":
        call.works.append(dist.all_to_all_single(output, input, **call.options))
    elif call.drawn.name == "all_to_all_single, uneven":
        call.works.append(dist.all_to_all_single(output, input, call.receives, call.sends, **call.options))
    else:
        from torch_npu.distributed import all_to_all_vc

        call.works.append(all_to_all_vc(output, input, torch.tensor(call.drawn.counts), **call.options))
    return [(output, torch.cat([call.data(rank, call.rank) for rank in call.ranks]))]


def _all_to_all(call: Call) -> Results:
    outputs = [call.room(count) for count in call.receives]
    call.works.append(dist.all_to_all(outputs, [call.mine(rank) for rank in call.ranks], **call.options))
    return [(output, call.data(rank, call.rank)) for rank, output in enumerate(outputs)]


def _messages(call: Call) -> Results:
    """Send to and receive from every other rank."""
    results, operations = [], []
    for rank in call.ranks:
        if rank != call.rank:
            peer, output = dist.get_global_rank(call.group, rank), call.room(call.receives[rank])
            operations.append(dist.P2POp(dist.isend, call.mine(rank), peer, call.group))
            operations.append(dist.P2POp(dist.irecv, output, peer, call.group))
            results.append((output, call.data(rank, call.rank)))
    if operations:
        call.works += dist.batch_isend_irecv(operations)
    return results


def _send_and_recv(call: Call) -> Results:
    """Send one message from the root to the next rank, and one back."""
    root, behind = call.drawn.root, (call.drawn.root + 1) % len(call.ranks)
    if root == behind or call.rank not in (root, behind):
        return []
    other = behind if call.is_root else root
    peer, tensor, output = dist.get_global_rank(call.group, other), call.mine(), call.room(call.receives[other])
    steps = [lambda: dist.isend(tensor, peer, call.group), lambda: dist.irecv(output, peer, call.group)]
    for step in steps if call.is_root else reversed(steps):
        call.works.append(step())
    return [(output, call.data(other))]


def _barrier(call: Call) -> Results:
    call.works.append(dist.barrier(**call.options))
    return []


@dataclass(frozen=True)
class Collective:
    """A collective, the dtypes that torch_npu accepts, and the counts that may differ."""

    make: Callable[[Call], Results]
    dtypes: tuple[torch.dtype, ...] = MOVED
    counts: str = "equal"


_REDUCED = (*FLOATS, *INTEGERS)
_REAL = tuple(dtype for dtype in MOVED if not dtype.is_complex)  # supported by torch_npu's own functions
COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, (*_REDUCED, *CAST)),
    "reduce": Collective(_reduce, (*_REDUCED, *CAST)),
    "reduce_scatter": Collective(_reduce_scatter, _REDUCED),
    "reduce_scatter, uneven": Collective(_reduce_scatter, _REDUCED, "by receiver"),
    "reduce_scatter_tensor": Collective(_reduce_scatter_tensor, _REDUCED),
    "reduce_scatter_tensor_uneven": Collective(_reduce_scatter_tensor, _REDUCED, "by receiver"),
    "broadcast": Collective(_broadcast),
    "all_gather": Collective(_all_gather),
    "all_gather, uneven": Collective(_all_gather, counts="by sender"),
    "all_gather_into_tensor": Collective(_all_gather_into_tensor),
    "all_gather_into_tensor_uneven": Collective(_all_gather_into_tensor, _REAL, "by sender"),
    "all_gather_into_tensor, coalesced": Collective(_coalesced_all_gather),
    "gather": Collective(_gather, _REAL),
    "scatter": Collective(_scatter),
    "all_to_all_single": Collective(_all_to_all_single),
    "all_to_all_single, uneven": Collective(_all_to_all_single, counts="free"),
    # torch_npu mistakes two empty tensors for one.
    "all_to_all_vc": Collective(_all_to_all_single, _REAL, "free, not zero"),
    "all_to_all": Collective(_all_to_all, counts="free"),
    "batch_isend_irecv": Collective(_messages, counts="free, not zero"),
    "isend and irecv": Collective(_send_and_recv),
    "barrier": Collective(_barrier),
}
if torch.__version__ < "2.10":  # torch_npu 2.9 lacks it
    del COLLECTIVES["all_to_all_vc"]


def draw(seed: int, number: int, size: int) -> Drawn:
    """Return a call of a group of this size. The first calls are one of each collective."""
    chosen = random.Random(f"{seed} {number}")
    names = list(COLLECTIVES)
    name = names[number] if number < len(names) else chosen.choice(names)
    collective = COLLECTIVES[name]
    dtype = chosen.choice(collective.dtypes)
    ops = ["SUM", "MAX", "MIN", *(["AVG"] if dtype in FLOATS and name == "all_reduce" else [])]
    ops += ["PRODUCT"] if dtype not in (torch.int16, torch.bfloat16) else []  # the chip does not multiply these
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


def _groups(world_size: int) -> list[tuple[list[int], Any]]:
    """Return the ranks and the group of some subsets."""
    subsets = [list(range(world_size)), *([[0, world_size - 1], [1, 2]] if world_size > 2 else [])]
    return [(ranks, dist.new_group(ranks)) for ranks in subsets]


def compare(device: str, seed: int, calls: int) -> tuple[Counter[str], list[str]]:
    """Make calls as one of the processes; return the count of each kind, and descriptions of wrong results."""
    groups = _groups(dist.get_world_size())
    made: Counter[str] = Counter()
    differences: list[str] = []
    pending: list[tuple[Call, Results]] = []
    stream = torch.npu.Stream()
    for number in range(calls):
        ranks, group = groups[random.Random(f"{seed} group {number}").randrange(len(groups))]
        if number < len(COLLECTIVES):
            ranks, group = groups[0]
        if dist.get_rank() not in ranks:
            continue
        drawn = draw(seed, number, len(ranks))
        with torch.npu.stream(stream if drawn.on_another_stream else torch.npu.current_stream()):
            call = Call(drawn, ranks.index(dist.get_rank()), device, group)
            pending.append((call, COLLECTIVES[drawn.name].make(call)))
        made[drawn.name] += 1
        if not drawn.is_awaited_later:
            differences += _differences(pending)
            pending.clear()
    return made, differences + list(_differences(pending))


def _differences(pending: list[tuple[Call, Results]]) -> Iterator[str]:
    for call, results in pending:
        with torch.npu.stream(call.stream):
            for work in call.works:
                if work is not None:
                    work.wait()
            for actual, expected in results:
                if not torch.equal(_bits(actual), _bits(expected)):
                    yield f"rank {call.rank}: {call.drawn}: {actual} instead of {expected}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def main() -> int:
    """Run as the command line requests; return 1 if results differ."""
    parser = argparse.ArgumentParser(description="Compare collectives of simulated NPUs with their definition.")
    parser.add_argument("--calls", type=int, default=10000, help="calls in all (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Several ranks on one device, and one rank per device.
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
    from tests import collectives  # under the name that other processes import

    sys.exit(collectives.main())
