"""Updates of captured graphs as in vLLM: a replay waits until each attention has the lengths of the step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch_npu
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 captures in another way")

_HEADS, _SIZE, _BLOCK, _SCALE = 4, 16, 16, 0.25
_LENGTHS = [[3, 20], [1, 7], [32, 32]]


@pytest.fixture(autouse=True)
def back_on_the_default_stream() -> Iterator[None]:
    yield
    torch.npu.set_stream(torch.npu.default_stream())


class _Cache:
    """Keys and values of two sequences, two blocks each."""

    def __init__(self) -> None:
        self.keys, self.values = torch.randn(2, 5, _BLOCK, _HEADS, _SIZE).half()
        self.table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
        self.on_npu = self.keys.npu(), self.values.npu(), self.table.npu()

    def attention(self, query: Tensor, lengths: list[int]) -> Tensor:
        """Return the attention of one query per sequence, [2, heads, size], in float64."""
        rows = []
        for row, blocks, length in zip(query.cpu().double(), self.table.long(), lengths, strict=True):
            keys, values = (x[blocks].flatten(0, 1)[:length].double() for x in (self.keys, self.values))
            scores = torch.einsum("hd,shd->hs", row, keys) * _SCALE
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values))
        return torch.stack(rows)


def _fused(query: Tensor, cache: _Cache, lengths: list[int], out: Tensor, workspace: Tensor | None) -> None:
    keys, values, table = cache.on_npu
    torch_npu.npu_fused_infer_attention_score.out(
        query,
        keys.view(-1, _BLOCK, _HEADS * _SIZE),
        values.view(-1, _BLOCK, _HEADS * _SIZE),
        workspace=workspace,
        # vLLM passes a tensor of this dtype, which is not written.
        out=[out, torch.empty(1, dtype=query.dtype, device="npu")],
        **_options(table, lengths),
    )


def _options(table: Tensor, lengths: list[int]) -> dict[str, object]:
    return {
        "block_table": table,
        "block_size": _BLOCK,
        "input_layout": "TND",
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": lengths,
        "num_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "scale": _SCALE,
    }


def _workspace_of_fused(query: Tensor, cache: _Cache) -> Tensor:
    keys, values, table = cache.on_npu
    return torch_npu._npu_fused_infer_attention_score_get_max_workspace(
        query, keys.flatten(2), values.flatten(2), **_options(table, [2 * _BLOCK] * 2)
    )


def _paged(query: Tensor, cache: _Cache, lengths: list[int], out: Tensor, workspace: Tensor | None) -> None:
    keys, values, table = cache.on_npu
    lengths = torch.tensor(lengths, dtype=torch.int32)
    torch_npu._npu_paged_attention(
        query, keys, values, _HEADS, _HEADS, _SCALE, table, lengths, out=out, workspace=workspace
    )


def _workspace_of_paged(query: Tensor, cache: _Cache) -> Tensor:
    keys, values, table = cache.on_npu
    lengths = torch.tensor([2 * _BLOCK] * 2, dtype=torch.int32)
    return torch_npu._npu_paged_attention_get_workspace(
        query, keys, values, _HEADS, _HEADS, _SCALE, table, lengths, out=torch.empty_like(query)
    )


@dataclass
class _Layer:
    """An attention of a graph, and the data for its updates."""

    call: Callable[..., None]
    cache: _Cache
    query: Tensor
    out: Tensor
    workspace: Tensor
    event: "torch.npu.ExternalEvent" = field(default_factory=lambda: torch.npu.ExternalEvent())
    handle: object = None

    def capture(self) -> None:
        stream = torch.npu.current_stream()
        self.event.wait(stream)
        self.event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        self.call(self.query, self.cache, [1, 1], self.out, self.workspace)
        self.handle = torch.npu.graph_task_group_end(stream)

    def update(self, stream: "torch.npu.Stream", lengths: list[int]) -> None:
        torch.npu.graph_task_update_begin(stream, self.handle)
        self.call(self.query, self.cache, lengths, self.out, self.workspace)
        torch.npu.graph_task_update_end(stream)
        self.event.record(stream)


_ATTENTIONS = {"fused": (_fused, _workspace_of_fused), "paged": (_paged, _workspace_of_paged)}


@pytest.mark.parametrize("attention", _ATTENTIONS)
def test_each_replay_takes_the_lengths_that_it_waits_for(attention):
    call, workspace_of = _ATTENTIONS[attention]
    caches = [_Cache(), _Cache()]
    query = torch.zeros(2, _HEADS, _SIZE).half().npu()
    workspace = workspace_of(query, caches[0])
    graph, layers, hidden = torch.npu.NPUGraph(), [], query
    with torch.npu.graph(graph):
        for cache in caches:
            layers.append(_Layer(call, cache, hidden, torch.empty_like(hidden), workspace))
            layers[-1].capture()
            hidden = layers[-1].out + 1
    updates = torch.npu.Stream()
    for lengths in _LENGTHS:
        query.copy_(torch.randn(2, _HEADS, _SIZE))
        graph.replay()
        with torch.npu.stream(updates):
            for layer in layers:
                layer.update(updates, lengths)
        torch.npu.current_stream().synchronize()
        for layer in layers:
            wanted = layer.cache.attention(layer.query, lengths)
            torch.testing.assert_close(layer.out.cpu().double(), wanted, rtol=0, atol=2**-10 * wanted.abs().max())
        assert torch.equal(hidden, layers[-1].out + 1)


@pytest.mark.parametrize("names", [("", "actual_seq_lengths_kv"), ("_v2", "actual_seq_kvlen")], ids=["v1", "v2"])
def test_a_graph_can_update_itself(names):
    version, lengths = names
    call = getattr(torch_npu, f"npu_fused_infer_attention_score{version}")
    heads, scale = ("num_query_heads", "softmax_scale") if version else ("num_heads", "scale")
    query, keys, values = torch.randn(3, 1, _HEADS, 8, _SIZE).half().npu()
    options = {heads: _HEADS, scale: _SCALE, "input_layout": "BNSD"}
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out, _ = call(query, keys, values, **{lengths: [8]}, **options)
        doubled = out * 2
    for length in 3, 5:
        graph.replay()
        graph.update(cpu_update_input=[{lengths: [length]}])
        torch.npu.synchronize()
        assert torch.equal(doubled, call(query, keys, values, **{lengths: [length]}, **options)[0] * 2)


def _captured_group(call: Callable[[], Tensor]) -> tuple["torch.npu.NPUGraph", object, Tensor]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        result = call()
        handle = torch.npu.graph_task_group_end(stream)
    return graph, handle, result


def _update(handle: object, call: Callable[[], object]) -> None:
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        torch.npu.graph_task_update_begin(stream, handle)
        call()
        torch.npu.graph_task_update_end(stream)
        stream.synchronize()


_OTHERS = {
    "nothing": (lambda x: None, ""),
    "another operator": (lambda x: torch_npu.npu_fast_gelu(x), " aclnnFastGelu"),
    "one more": (lambda x: torch_npu.npu_swiglu(torch_npu.npu_swiglu(x)), " aclnnSwiGlu aclnnSwiGlu"),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_an_update_of_other_operators_is_refused_and_the_graph_stays(name):
    call, given = _OTHERS[name]
    x = torch.tensor([1.0, -2.0, 3.0, 4.0]).npu()
    graph, handle, y = _captured_group(lambda: torch_npu.npu_swiglu(x))
    with pytest.raises(RuntimeError, match=rf"has the operators \[ aclnnSwiGlu \], the update \[{given} \]"):
        _update(handle, lambda: call(x))
    graph.replay()
    assert torch.equal(y, torch_npu.npu_swiglu(x))


def test_a_task_group_ends_with_its_graph():
    x = torch.ones(4, device="npu")
    graph, handle, _ = _captured_group(lambda: torch_npu.npu_swiglu(x))
    graph.reset()
    with pytest.raises(RuntimeError, match="the handle is not a live aclrtTaskGrp"):
        _update(handle, lambda: torch_npu.npu_swiglu(x))


def test_groups_and_updates_begin_once_and_end_once():
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        with pytest.raises(RuntimeError, match="the stream is not being captured"):
            torch.npu.graph_task_group_begin(stream)
        with pytest.raises(RuntimeError, match="no update has begun on the stream"):
            torch.npu.graph_task_update_end(stream)
    with torch.npu.graph(torch.npu.NPUGraph()):
        stream = torch.npu.current_stream()
        with pytest.raises(RuntimeError, match="no task group has begun on the stream"):
            torch.npu.graph_task_group_end(stream)
        torch.npu.graph_task_group_begin(stream)
        with pytest.raises(RuntimeError, match="a task group has begun on the stream already"):
            torch.npu.graph_task_group_begin(stream)
        torch.npu.graph_task_group_end(stream)


def test_a_captured_stream_updates_nothing():
    x = torch.ones(4, device="npu")
    alive = _captured_group(lambda: torch_npu.npu_swiglu(x))
    sentence = "an update of a task group is not possible while a graph is captured on this stream"
    with pytest.raises(RuntimeError, match=sentence):
        _captured_group(lambda: torch.npu.graph_task_update_begin(torch.npu.current_stream(), alive[1]))
