"""Calls that a device refuses during a capture are refused here with a message, and eager work continues."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch_npu
from host_npu import testing
from tests._process import on_npu
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 captures in another way")


@pytest.fixture(autouse=True)
def eager_work_goes_on() -> Iterator[None]:
    yield
    torch.npu.set_stream(torch.npu.default_stream())
    assert not torch.npu.is_current_stream_capturing()
    x = torch.ones(4, device="npu", requires_grad=True)
    F.mse_loss(x * 3, torch.zeros(4, device="npu")).backward()
    torch.npu.synchronize()
    assert x.grad.tolist() == [4.5] * 4
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x.detach() + 1
    graph.replay()
    assert y.tolist() == [2] * 4


def _record_and(call: Callable[["torch.npu.Event"], object]) -> None:
    event = torch.npu.Event()
    event.record()
    torch.npu.current_stream().npu_stream  # noqa: B018, makes torch_npu's queue empty
    call(event)


def _fork() -> None:
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        torch.ones(2, device="npu")


def _add_to(out: Tensor, x: Tensor) -> None:
    torch.add(out, x, out=out)


_HOST = torch.zeros(4)
_STREAM = "to wait for a stream is not possible while a graph is captured on this stream"
# A name, the call, and the error message.
REFUSED: list[tuple[str, Callable[[Tensor], object], str]] = [
    ("a wait for the device", lambda x: torch.npu.synchronize(), "to wait for a device is not possible while a graph"),
    ("a wait for the stream", lambda x: torch.npu.current_stream().synchronize(), _STREAM),
    ("a question about the stream", lambda x: torch.npu.current_stream().query(), "to query a stream is not possible"),
    ("a wait for an event", lambda x: _record_and(lambda event: event.synchronize()), "to wait for an event"),
    ("item", lambda x: x.sum().item(), _STREAM),
    ("a branch", lambda x: 1 if x[0] > 1 else 2, _STREAM),
    ("a copy to the host", lambda x: x.cpu(), _STREAM),
    ("a copy from the host", lambda x: x.copy_(_HOST), _STREAM),
    ("a copy that waits, to pinned memory", lambda x: torch.zeros(4).pin_memory().copy_(x), _STREAM),
    ("an asynchronous copy to pageable memory", lambda x: _HOST.copy_(x, non_blocking=True), "not page-locked"),
    ("an asynchronous copy from pageable memory", lambda x: x.copy_(_HOST, non_blocking=True), "not page-locked"),
    ("a new tensor of the host's values", lambda x: torch.tensor([1.0, 2.0], device="npu"), _STREAM),
    ("nonzero", lambda x: x.nonzero(), "the shape of the result of aten::nonzero depends on values"),
    ("unique", lambda x: x.unique(), "the shape of the result of aten::_unique2 depends on values"),
    ("masked_select", lambda x: x.masked_select(x > 1), "aten::masked_select depends on values"),
    ("a mask as index", lambda x: x[x > 1], "aten::index.Tensor depends on the values of a mask"),
    ("equal", lambda x: torch.equal(x, x), "the host reads the result of aten::equal"),
    ("a sparse result", lambda x: x.to_sparse(), "because its result is sparse"),
    ("a stream that has not joined", lambda x: _fork(), "a stream that took part has work that the first stream has"),
    ("a seed", lambda x: torch.npu.manual_seed(torch.npu.initial_seed() + 1), "only if new seed is the same"),
    ("a shape that does not fit", lambda x: x + torch.ones(3, device="npu"), "must match the size"),
    ("a tensor of the host", lambda x: x + torch.ones(4), "all tensors to be on the same device"),
    ("an output that is an input", lambda x: _add_to(x[:1].clone(), x), "doesn't match the broadcast shape"),
]  # fmt: skip
if torch.__version__ >= (2, 12):  # an older torch_npu aborts the process when it frees such a graph
    second = "a second capture of the stream", lambda x: torch.npu.NPUGraph().capture_begin(), "being captured already"
    REFUSED.append(second)


def _capture(call: Callable[[Tensor], object], **options) -> "torch.npu.NPUGraph":
    x, graph = torch.arange(4.0).npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        call(x + 1)
    return graph


@pytest.mark.parametrize(("name", "call", "sentence"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_capture_refuses(name, call, sentence):
    with pytest.raises((RuntimeError, IndexError), match=sentence):
        _capture(call)


def test_a_refusal_that_was_caught_leaves_no_graph():
    def go_on(x: Tensor) -> None:
        with pytest.raises(RuntimeError, match=_STREAM):
            x.sum().item()
        with pytest.raises(RuntimeError, match="the capture is invalid, so nothing more is recorded, since this was"):
            x.mul(2)

    with pytest.raises(RuntimeError, match=f"the capture has no graph, because this was refused .*: {_STREAM}"):
        _capture(go_on)


def test_an_event_of_before_is_not_waited_for():
    event = torch.npu.Event()
    event.record()
    with pytest.raises(RuntimeError, match="waits for an event that was recorded outside of the capture"):
        _capture(lambda x: event.wait())


def test_an_event_of_a_capture_is_not_waited_for_afterwards():
    event = torch.npu.Event()
    _capture(lambda x: event.record())
    event.wait()
    with pytest.raises(RuntimeError, match="a captured stream has recorded it"):
        torch.npu.synchronize()
    event.record()
    event.synchronize()


def test_graphs_of_two_captures_do_not_wait_for_each_other():
    event, other = torch.npu.Event(), torch.npu.NPUGraph()
    side = torch.npu.Stream()

    def capture_another(x: Tensor) -> None:
        with torch.npu.stream(side):
            other.capture_begin()
            event.record()
        event.wait()

    with pytest.raises(RuntimeError, match="waits for an event of another capture"):
        _capture(capture_another)
    with torch.npu.stream(side), pytest.raises(RuntimeError, match="waits for an event of another capture"):
        other.capture_end()


def test_a_capture_ends_once():
    graph = _capture(lambda x: None)
    with pytest.raises(RuntimeError):
        graph.capture_end()
    graph.replay()


def test_only_a_graph_that_was_captured_is_replayed():
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        torch.npu.NPUGraph().replay()
    graph = _capture(lambda x: None)
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_a_graph_is_not_replayed_into_another():
    graph = _capture(lambda x: None)
    with pytest.raises(RuntimeError, match="is not possible while a graph is captured|during capturing"):
        _capture(lambda x: graph.replay())


def test_a_dump_is_refused(tmp_path):
    graph = _capture(lambda x: None)
    with pytest.raises(RuntimeError, match="the host NPU does not simulate dumps of captured graphs"):
        graph.debug_dump(str(tmp_path / "graph.json"))


@pytest.mark.usefixtures("private_formats")
def test_a_tensor_in_a_private_format_is_refused():
    weight = torch_npu.npu_format_cast(torch.rand(32, 32, device="npu", dtype=torch.float16), 29)
    with pytest.raises(RuntimeError, match="of a tensor in a private format"):
        _capture(lambda x: weight.exp())


def _capture_without_memory() -> None:
    x, graph = torch.ones(4, device="npu"), torch.npu.NPUGraph()
    with pytest.raises(torch.OutOfMemoryError), torch.npu.graph(graph):
        torch.empty(1 << 30, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 2
    graph.replay()
    assert y.tolist() == [2] * 4


@pytest.mark.parametrize("soc", ["Ascend910B", "Ascend310P"])
def test_after_a_capture_without_memory_the_process_captures(soc):
    on_npu(_capture_without_memory, HOST_NPU_SOC=soc, HOST_NPU_MEMORY="256")


def _capture_a_collective(device: str) -> None:
    x, graph = torch.ones(4, device=device) * 2, torch.npu.NPUGraph()
    dist.all_reduce(x)
    torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="the host NPU does not capture HcclAllReduce"), torch.npu.graph(graph):
        dist.all_reduce(x * 2)
    torch.npu.set_stream(torch.npu.default_stream())
    dist.all_reduce(x)
    torch.npu.synchronize()
    assert x.tolist() == [2] * 4


def test_after_a_refused_collective_the_process_communicates():
    testing.run(_capture_a_collective, 1, device="npu", devices=2)
