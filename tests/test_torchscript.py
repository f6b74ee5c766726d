"""torch.jit: what it can trace, and what it cannot script, as the README says."""

from torch_aclnn_ops import functional, nn

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::FutureWarning")


def _rows(number):
    torch.manual_seed(number)
    return torch.rand(number, 3, requires_grad=True), torch.rand(number, 3)


def _labels(number):
    rows, head = torch.rand(number, 3, requires_grad=True), torch.rand(5, 3, requires_grad=True)
    return rows, head, torch.arange(number).remainder(5)


def _linear(**options):
    return lambda rows, head, labels: functional.linear_cross_entropy(rows, head, labels, **options)


TRACED = {
    "mse_loss": (functional.mse_loss, _rows),
    "binary_cross_entropy": (functional.binary_cross_entropy, _rows),
    "embedding": (
        functional.embedding,
        lambda number: (torch.arange(number) % 4, torch.rand(4, 2, requires_grad=True)),
    ),
    "linear_cross_entropy": (functional.linear_cross_entropy, _labels),
    "chunked": (_linear(chunk_size=2, softcap=3.0, label_smoothing=0.1), _labels),
    "ignored rows": (_linear(ignore_index=2, reduction="none"), _labels),
    "probabilities": (lambda x, w, t: functional.linear_cross_entropy(x, w, (x @ w.T).softmax(1)), _labels),
    "batch and time": (
        lambda x, w, t: functional.linear_cross_entropy(x.unsqueeze(0), w, t.unsqueeze(0), shift=True),
        _labels,
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_computes_the_same_for_any_number_of_rows(name):
    function, make = TRACED[name]
    traced = torch.jit.trace(function, make(4), check_trace=False)
    for number in (4, 7):
        inputs = make(number)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        results = [each(*inputs) for each in (traced, function)]
        torch.testing.assert_close(*results)
        gradients = [torch.autograd.grad(result.sum(), leaves) for result in results]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "module",
    [nn.MSELoss(), nn.BCELoss(), nn.Embedding(3, 2), nn.LinearCrossEntropyLoss(3, 5)],
    ids=lambda module: type(module).__name__,
)
def test_nothing_can_be_scripted(module):
    with pytest.raises(Exception):  # noqa: B017  (scripting raises many classes)
        torch.jit.script(module)
