"""Models that train in captured graphs on the host NPU, as they do without."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 captures in another way")


class Block(nn.Module):
    """A transformer block, whose positions and mask are created in the forward pass."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 11)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        q, k, v = self.qkv(self.first(hidden)).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.dropout(self.out(attended))
        return self.head(hidden + self.down(F.gelu(self.up(self.second(hidden)))))


def _models(**options) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Block(**options)
    copy = Block(**options)
    copy.load_state_dict(model.state_dict())
    return model.npu(), copy.npu()


def _batches(count: int) -> list[Tensor]:
    return [torch.randint(11, (2, 6)) for _ in range(count)]


def test_a_captured_forward_pass_is_the_eager_one():
    model, _ = _models()
    model.eval()
    static = torch.zeros(2, 6, dtype=torch.long, device="npu")
    with torch.no_grad():
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            logits = model(static)
        for batch in _batches(3):
            static.copy_(batch)
            graph.replay()
            assert torch.equal(logits, model(batch.npu()))


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, capturable=True),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, capturable=True, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_captured_training_step_is_the_eager_one(optimizer):
    model, reference = _models()
    static = torch.zeros(2, 6, dtype=torch.long, device="npu")
    pairs = [(each, optimizer(each.parameters())) for each in (model, reference)]

    def step(model: nn.Module, of: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        of.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        of.step()
        return loss.detach()

    side = torch.npu.Stream()
    with torch.npu.stream(side):
        for batch in _batches(2):
            for each, of in pairs:
                step(each, of, batch.npu())
    side.synchronize()
    before = [parameter.clone() for parameter in model.parameters()]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        loss = step(*pairs[0], static)
    assert all(map(torch.equal, model.parameters(), before))
    for batch in _batches(4):
        static.copy_(batch)
        graph.replay()
        assert torch.equal(loss, step(*pairs[1], batch.npu()))
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_graphed_callables_have_the_results_and_gradients_of_the_module():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).npu() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    graphed = torch.npu.make_graphed_callables(modules[0], (torch.randn(5, 4, device="npu", requires_grad=True),))
    for _ in range(2):
        values = torch.randn(5, 4)
        inputs = [values.npu().requires_grad_() for _ in range(2)]
        for module, call, given in zip(modules, (graphed, modules[1]), inputs, strict=True):
            module.zero_grad()
            F.mse_loss(call(given), torch.ones(5, 3, device="npu")).backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
