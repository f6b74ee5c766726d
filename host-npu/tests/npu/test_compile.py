"""``torch.compile`` on the host NPU, which runs the operators of a graph."""

import pytest
import torch
import torch_npu
from torch import nn
from torch._inductor.utils import run_and_get_code

with_captures = pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 captures graphs in another way")
with_inductor = pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 asks triton for the chip first")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(16))
        self.up = nn.Linear(16, 32)

    def forward(self, x):
        return torch_npu.npu_swiglu(self.up(torch_npu.npu_rms_norm(x, self.norm)[0])).square().mean()


def _loss_and_gradients(call, block, x):
    block.zero_grad()
    loss = call(x)
    loss.backward()
    return [loss.item(), *(parameter.grad.tolist() for parameter in block.parameters())]


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=with_inductor),
        pytest.param("npugraphs", marks=with_captures),
        pytest.param("npugraph_ex", marks=with_captures),
    ],
)
def test_a_block_trains_as_without_it(backend):
    torch._dynamo.reset()
    block = Block().npu()
    compiled = torch.compile(block, backend=backend)
    for _ in range(3):  # the third call replays the capture of the second
        x = torch.rand(4, 16, device="npu")
        assert _loss_and_gradients(compiled, block, x) == _loss_and_gradients(block, block, x)


@with_captures
@pytest.mark.parametrize(
    ("backend", "earlier"), [("aot_eager", (1.0, 4.0)), ("npugraphs", (1.0, 4.0)), ("npugraph_ex", (5.0, 20.0))]
)
def test_a_later_call_of_npugraph_ex_overwrites_the_input_and_result_of_the_first(backend, earlier):
    # torch_npu replays into the tensors of the first call, also on a device: acl_graph.py does not copy an input that
    # the backward pass reads. docs/limits.md documents it.
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, weight: (x * weight).sum(), backend=backend)
    weight = torch.ones(4, device="npu", requires_grad=True)
    first, second = torch.full((4,), 1.0, device="npu"), torch.full((4,), 5.0, device="npu")
    losses = compiled(first, weight), compiled(second, weight)
    (losses[0] + losses[1]).backward()
    assert (first[0].item(), losses[0].item()) == earlier
    assert (second[0].item(), losses[1].item()) == (5.0, 20.0)
    assert weight.grad.tolist() == [earlier[0] + 5.0] * 4


@with_inductor
@pytest.mark.parametrize(
    "options", [{"mode": "max-autotune"}, {"mode": "reduce-overhead"}, {"dynamic": True}, {"fullgraph": True}], ids=str
)
def test_inductor_takes_its_options(options):
    torch._dynamo.reset()
    compiled = torch.compile(torch.sin, **options)
    for size in (4, 5):
        x = torch.rand(size, device="npu")
        assert compiled(x).tolist() == x.sin().tolist()


@with_inductor
def test_inductor_calls_the_operators_of_a_graph_that_has_only_results_on_an_npu():
    torch._dynamo.reset()
    assert torch.compile(lambda: torch.ones(3, device="npu") * 2)().tolist() == [2, 2, 2]
    assert torch.compile(lambda x: x.npu().cos())(torch.rand(4)).device.type == "npu"


@with_inductor
@pytest.mark.skipif(
    torch.__version__[:4] == "2.11" and torch.version.cuda is not None,
    reason="torch_npu 2.11 takes the triton of a CUDA build for triton-ascend",
)
def test_inductor_compiles_a_graph_of_cpu_tensors():
    torch._dynamo.reset()
    x = torch.rand(4)
    result, code = run_and_get_code(torch.compile(torch.cos), x)
    assert torch.allclose(result, x.cos()) and len(code) == 1


def test_inductor_has_no_code_to_write_to_a_file():
    exported = torch.export.export(Block().npu(), (torch.rand(4, 16, device="npu"),))
    with pytest.raises(RuntimeError, match="has no code to write to a file: use torch.compile"):
        torch._inductor.aoti_compile_and_package(exported)
