"""torch.jit.trace, as the README says."""

from torch_aclnn_ops import functional

import pytest
import torch

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)


def _rows(number):
    torch.manual_seed(number)
    return torch.rand(number, 3, requires_grad=True), torch.rand(number, 3)


def _labels(number):
    rows, head = torch.rand(number, 3, requires_grad=True), torch.rand(5, 3, requires_grad=True)
    return rows, head, torch.arange(number).remainder(5)


TRACED = {
    "mse_loss": (functional.mse_loss, _rows),
    "binary_cross_entropy": (functional.binary_cross_entropy, _rows),
    "embedding": (functional.embedding, lambda rows: (torch.arange(rows) % 4, torch.rand(4, 2, requires_grad=True))),
    "linear_cross_entropy": (functional.linear_cross_entropy, _labels),
    "chunked": (lambda *args: functional.linear_cross_entropy(*args, chunk_size=2, label_smoothing=0.1), _labels),
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
