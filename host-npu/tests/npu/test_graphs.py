"""Captured graphs on the host NPU: a replay computes what the captured calls would, and a capture computes nothing."""

import functools
from collections.abc import Callable, Iterator

import host_npu
import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 captures in another way")


@pytest.fixture(autouse=True)
def back_on_the_default_stream() -> Iterator[None]:
    yield
    torch.npu.set_stream(torch.npu.default_stream())


def captured(call: Callable[[], object], **options) -> tuple["torch.npu.NPUGraph", object]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = call()
    return graph, result


def ones(*shape: int, **options) -> Tensor:
    return torch.ones(shape, device="npu", **options)


# State that a capture does not change.


CALLS = {
    "a new result": lambda x: x * 2 + 1,
    "a result that has its memory": lambda x: torch.mul(x, 3, out=torch.empty_like(x)),
    "a result that gets its size": lambda x: torch.add(x, 1, out=torch.empty(0, device="npu")),
    "a result that is every operand": lambda x: torch.mul(y := x + 1, y, out=y),
    "a result that is a conjugate": lambda x: torch.complex(x, x).conj_physical_().imag,
    "counts of integers": lambda x: torch.histc(x.int(), 4, 0, 8),
    "several results": lambda x: torch.stack(x.topk(2).indices.to(x.dtype).split(1)),
    "a list of tensors": lambda x: torch.stack(torch._foreach_mul([x, x + 1], 2.0)),
    "a view": lambda x: x.view(2, 2).t()[1:].mul(5),
    "a copy with gaps": lambda x: x.view(2, 2).t().contiguous(),
    "an operand of the host": lambda x: x + torch.tensor(7.0),
    "a conversion": lambda x: x.half().float(),
    "a launch of CANN": lambda x: F.mse_loss(x, x * 2),
    "a fused operator": lambda x: torch_npu.npu_rms_norm(x.view(1, 4), ones(4))[0],
    "memory of the capture": lambda x: torch.zeros(4, device="npu").add_(x).index_add_(
        0, torch.arange(2, device="npu"), x[:2]
    ),
    "an index that the graph computes": lambda x: x[x.argsort(descending=True)],
    "values behind a mask": lambda x: torch.where(x > 2, x, -x),
    "a product": lambda x: x.view(2, 2) @ x.view(2, 2).t(),
    "16 bits": lambda x: x.bfloat16().view(2, 2) @ x.bfloat16().view(2, 2),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_replay_is_the_call_on_what_is_in_memory_now(call):
    x = ones(4)
    graph, result = captured(lambda: call(x))
    for start in 1, 5:
        values = torch.arange(start, start + 4.0)
        x.copy_(values)
        graph.replay()
        assert torch.equal(result, call(values.npu()))


IN_PLACE = {
    "an operator of PyTorch": lambda x: x.add_(1),
    "a list of tensors": lambda x: torch._foreach_add_([x[:2], x[2:]], 1),
    "a fill": lambda x: x.zero_(),
    "a fill behind a mask": lambda x: x.__setitem__(x > 1, 0),
    "a slice": lambda x: x.__setitem__(slice(1, 3), 4),
    "a copy": lambda x: x.copy_(x.flip(0)),
    "a copy with gaps": lambda x: x.view(2, 2).copy_(x.view(2, 2).t().clone()),
    "a random number": lambda x: x.uniform_(),
}  # fmt: skip


@pytest.mark.parametrize("call", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_a_capture_changes_no_memory_and_a_replay_does(call):
    x = torch.arange(4.0).npu()
    graph, _ = captured(lambda: call(x))
    assert x.tolist() == [0, 1, 2, 3]
    graph.replay()
    assert x.tolist() != [0, 1, 2, 3]


def test_every_replay_changes_memory_again():
    x = ones(3)
    graph, y = captured(lambda: x.mul_(2) + 1)
    for expected in 2, 4, 8:
        graph.replay()
        assert (x.tolist(), y.tolist()) == ([expected] * 3, [expected + 1] * 3)


def test_the_host_changes_its_number_after_the_capture_in_vain():
    number, x = torch.tensor(2.0), ones(2)
    graph, y = captured(lambda: x * number)
    number.fill_(100)
    graph.replay()
    assert y.tolist() == [2, 2]


def test_page_locked_memory_is_copied_at_every_replay():
    source, target = torch.zeros(2).pin_memory(), torch.zeros(2).pin_memory()
    x = ones(2)

    def step() -> None:
        x.copy_(source, non_blocking=True)
        target.copy_(x * 10, non_blocking=True)

    graph, _ = captured(step)
    assert (x.tolist(), target.tolist()) == ([1, 1], [0, 0])
    for value in 3, 4:
        source.fill_(value)
        graph.replay()
        torch.npu.synchronize()
        assert (x.tolist(), target.tolist()) == ([value] * 2, [10 * value] * 2)


def test_work_on_other_streams_goes_on_during_a_capture_and_stays():
    x, other = ones(2), torch.npu.Stream()

    def step() -> Tensor:
        result = x + 1
        with torch.npu.stream(other):
            x.fill_(5)
        return result

    graph, y = captured(step)
    other.synchronize()
    assert x.tolist() == [5, 5]
    graph.replay()
    assert y.tolist() == [6, 6]


def test_launches_are_counted_when_they_are_replayed():
    x = ones(4)
    host_npu.reset()
    graph, _ = captured(lambda: F.mse_loss(x, x))
    assert host_npu.stats().launches.get("aclnnMseLoss", 0) == 0
    for _ in range(3):
        graph.replay()
    assert host_npu.stats().launches["aclnnMseLoss"] == 3


# Random numbers.


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of torch_npu": lambda x: torch_npu._npu_dropout(x, 0.5)[0],
    "rand": lambda x: torch.rand_like(x),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "randperm": lambda x: torch.randperm(100, device="npu"),
    "multinomial": lambda x: torch.multinomial(x, 20),
}
if torch.__version__ >= (2, 12):  # a graph of an older torch_npu draws from the default generator only
    RANDOM["a generator"] = lambda x: torch.rand(20, device="npu", generator=_generator())


@functools.cache
def _generator() -> torch.Generator:
    return torch.Generator("npu")


def _seed(value: int) -> None:
    torch.npu.manual_seed(value)
    _generator().manual_seed(value)


@pytest.mark.parametrize("call", RANDOM.values(), ids=RANDOM.keys())
def test_replays_draw_new_numbers_which_are_those_of_eager_calls(call):
    x = ones(256)
    _generator()
    graph, result = captured(lambda: call(x))
    _seed(3)
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append(result.clone())
    assert not any(torch.equal(drawn[one], drawn[other]) for one, other in ((0, 1), (0, 2), (1, 2)))
    _seed(3)
    for each in drawn:
        assert torch.equal(each, call(x))


def test_the_backward_pass_of_a_captured_dropout_has_its_mask():
    x = ones(64, requires_grad=True)

    def step() -> tuple[Tensor, Tensor]:
        y = F.dropout(x, 0.5)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    graph, (y, grad) = captured(step)
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, grad)


# Graphs and streams.


def test_graphs_that_share_a_pool_run_one_after_the_other():
    x = ones(1000)
    first, y = captured(lambda: (x + 1) * 2)
    second, z = captured(lambda: (y + 3) * 4, pool=first.pool())
    assert second.pool() == first.pool()
    for value in 0, 5:
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.unique().tolist() == [((value + 1) * 2 + 3) * 4]
    first.reset()
    x.fill_(1)
    second.replay()
    assert torch.isfinite(z).all()


def test_memory_of_the_graph_is_used_by_nobody_else():
    x = ones(1000)
    graph, y = captured(lambda: ((x + 1) * 2).square())
    kept = [ones(1000) for _ in range(20)]
    graph.replay()
    assert y.unique().tolist() == [16]
    assert all(each.unique().tolist() == [1] for each in kept)


def test_a_side_stream_that_forks_and_joins_is_captured():
    x, side = ones(4), torch.npu.Stream()

    def step() -> Tensor:
        first = x + 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            second = F.mse_loss(first * 10, torch.zeros_like(first))
            assert torch.npu.is_current_stream_capturing()
        third = first + 5
        torch.npu.current_stream().wait_stream(side)
        return second + third

    graph, y = captured(step)
    with torch.npu.stream(side):
        assert not torch.npu.is_current_stream_capturing()
    for value in 1, 2:
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [100 * (value + 1) ** 2 + value + 6] * 4


def test_a_replay_is_asynchronous_and_in_the_order_of_its_stream():
    x, stream, held = ones(2), torch.npu.Stream(), torch.npu.Stream()
    graph, y = captured(lambda: x * 2)
    with torch.npu.stream(stream):
        x.fill_(4)
        graph.replay()
        z = y + 1
        x.fill_(6)
        graph.replay()
    held.wait_stream(stream)
    with torch.npu.stream(held):
        assert (z.tolist(), y.tolist()) == ([9, 9], [12, 12])


def test_a_replay_waits_for_an_event_from_outside():
    x, event, other = ones(2), torch.npu.ExternalEvent(), torch.npu.Stream()

    def step() -> Tensor:
        event.wait()
        event.reset()
        return x * 2

    graph, y = captured(step)
    stream = torch.npu.Stream()
    for value in 3, 4:
        with torch.npu.stream(stream):
            graph.replay()
        with torch.npu.stream(other):
            x.fill_(value)
            event.record()
        stream.synchronize()
        assert y.tolist() == [2 * value] * 2


def test_an_error_of_a_replayed_kernel_is_reported_by_the_next_synchronization():
    table, index = ones(4, 2), torch.tensor([1, 2]).npu()
    graph, rows = captured(lambda: table[index] * 3)
    index.copy_(torch.tensor([1, 9]))
    graph.replay()
    with pytest.raises(RuntimeError, match=r"aten::index.Tensor failed on stream .* index 9 is out of bounds"):
        torch.npu.synchronize()
    index.fill_(0)
    graph.replay()
    assert rows.unique().tolist() == [3]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_every_mode_captures(mode):
    x = ones(2)
    graph, y = captured(lambda: x + 1, capture_error_mode=mode)
    graph.replay()
    assert y.tolist() == [2, 2]
