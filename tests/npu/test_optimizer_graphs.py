"""Steps of FusedEmaAdam in captured graphs of an NPU, whose replays the host does not count."""

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests._optim import assert_all_close, states_of

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch_npu 2.9 captures in another way")
OPTIONS = {
    "constant": {},
    "warm-up": {"ema_warmup": "ratio"},
    "start": {"ema_start_step": 6},
    "every": {"ema_update_every": 3},
}
BEFORE, CAPTURED, REPLAYS, AFTER = 2, 1, 7, 3


@pytest.fixture(autouse=True)
def back_on_the_default_stream():
    yield
    torch.npu.set_stream(torch.npu.default_stream())


class Training:
    """Steps with constant gradients, of all parameters or only of the first."""

    def __init__(self, flatten, **options):
        generator = torch.Generator().manual_seed(0)
        self.weights = [nn.Parameter(torch.randn(8, generator=generator).npu()) for _ in range(3)]
        self.gradients = [torch.randn(8, generator=generator).npu() for _ in self.weights]
        self.optimizer = FusedEmaAdam(self.weights, lr=1e-2, ema_decay=0.9, flatten=flatten, **options)

    def step(self, count, only_first):
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            weight.grad = None if only_first and weight is not self.weights[0] else gradient
        for _ in range(count):
            self.optimizer.step()

    def replay(self, only_first):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            self.step(CAPTURED, only_first)
        for _ in range(REPLAYS):
            graph.replay()


@pytest.mark.parametrize("only_first", [False, True], ids=["all", "one of three"])
@pytest.mark.parametrize("flatten", [True, False], ids=["flattened", "one by one"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_replays_and_the_steps_after_them_continue_the_schedule(options, flatten, only_first):
    replayed, plain = Training(flatten, **options), Training(flatten, **options)
    for training in (replayed, plain):
        training.step(BEFORE, False)
    replayed.replay(only_first)
    plain.step(REPLAYS, only_first)
    for training in (replayed, plain):
        training.step(AFTER, False)
    found, expected = ([state.cpu() for state in states_of(training.optimizer)] for training in (replayed, plain))
    assert [int(state) for state in expected if state.dim() == 0] == [12, *([5] * 2 if only_first else [12] * 2)]
    assert_all_close(found, expected, 1e-6)
    assert_all_close([w.detach().cpu() for w in replayed.weights], [w.detach().cpu() for w in plain.weights], 1e-6)
