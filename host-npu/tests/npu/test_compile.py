"""``torch.compile`` on the host NPU: backends that call operators compute what the operators do, others are refused."""

import pytest
import torch
import torch_npu
from torch import nn

with_captures = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch_npu 2.9 captures graphs in another way")


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
    ["aot_eager", pytest.param("npugraphs", marks=with_captures), pytest.param("npugraph_ex", marks=with_captures)],
)
def test_a_block_trains_as_without_it(backend):
    torch._dynamo.reset()
    block = Block().npu()
    compiled = torch.compile(block, backend=backend)
    for _ in range(3):  # the third call replays what the second has captured
        x = torch.rand(4, 16, device="npu")
        assert _loss_and_gradients(compiled, block, x) == _loss_and_gradients(block, block, x)


@with_captures
@pytest.mark.parametrize(
    ("backend", "earlier"), [("aot_eager", (1.0, 4.0)), ("npugraphs", (1.0, 4.0)), ("npugraph_ex", (5.0, 20.0))]
)
def test_a_later_call_of_npugraph_ex_overwrites_the_input_and_result_of_the_first(backend, earlier):
    # torch_npu replays into the tensors of the first call, on a device, too: acl_graph.py takes an input that the
    # backward pass reads without a copy. docs/limits.md says so.
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, weight: (x * weight).sum(), backend=backend)
    weight = torch.ones(4, device="npu", requires_grad=True)
    first, second = torch.full((4,), 1.0, device="npu"), torch.full((4,), 5.0, device="npu")
    losses = compiled(first, weight), compiled(second, weight)
    (losses[0] + losses[1]).backward()
    assert (first[0].item(), losses[0].item()) == earlier
    assert (second[0].item(), losses[1].item()) == (5.0, 20.0)
    assert weight.grad.tolist() == [earlier[0] + 5.0] * 4


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="Inductor of torch 2.9 looks for a driver of triton first")
def test_inductor_names_the_backends_that_run_also_after_npugraphs():
    refused = pytest.raises(Exception, match='generates no code for the host NPU: use backend="aot_eager"')
    with refused:
        torch.compile(lambda x: x.cos() + 1)(torch.rand(4, device="npu"))
    # npugraphs imports torch_npu's part of Inductor.
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="npugraphs")(torch.rand(4, device="npu"))
    torch._dynamo.reset()
    with refused:
        torch.compile(Block().npu())(torch.rand(4, 16, device="npu"))
