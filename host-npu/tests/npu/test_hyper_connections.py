"""Hyper-connections on the host NPU, with gradients, against float64."""

import pytest
import torch
import torch_npu
from tests._values import backward, leaves

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 calls these functions otherwise")


def _doubly_stochastic(x, iterations, epsilon):
    x = x.softmax(-1) + epsilon
    x = x / (x.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        x = x / (x.sum(-1, keepdim=True) + epsilon)
        x = x / (x.sum(-2, keepdim=True) + epsilon)
    return x


@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("shape", [(5, 4, 4), (2, 3, 6, 6), (3, 8, 8)], ids=str)
def test_matrices_become_doubly_stochastic(shape, iterations):
    x, weight = torch.randn(shape), torch.randn(shape)
    on_npu, reference = x.npu().requires_grad_(), x.double().requires_grad_()
    result, norms, sums = torch_npu.npu_mhc_sinkhorn(on_npu, eps=1e-8, num_iters=iterations, out_flag=1)
    expected = _doubly_stochastic(reference, iterations, 1e-8)
    torch.testing.assert_close(result.detach().cpu().double(), expected.detach(), rtol=0, atol=1e-6)
    expected.backward(weight.double())
    actual = torch_npu.npu_mhc_sinkhorn_backward(weight.npu(), norms, sums)
    torch.testing.assert_close(actual.cpu().double(), reference.grad, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leading", [(5,), (2, 3)], ids=str)
def test_streams_are_mixed_and_get_the_output_of_a_layer(leading, dtype):
    x, layer = torch.randn(*leading, 4, 16).to(dtype), torch.randn(*leading, 16).to(dtype)
    mix, post = torch.rand(*leading, 4, 4), torch.rand(*leading, 4)
    on_npu, reference = leaves(x, mix, layer, post)
    result = torch_npu.npu_mhc_post(*on_npu)
    expected = reference[1].mT @ reference[0] + reference[3][..., None] * reference[2].unsqueeze(-2)
    backward(result, expected)
    pairs = [(result, expected), *((each.grad, wide.grad) for each, wide in zip(on_npu, reference, strict=True))]
    for actual, wanted in pairs:
        limit = 2**-22 if actual.dtype == torch.float32 else torch.finfo(dtype).eps
        bound = 2 * limit * wanted.abs().max().item()
        torch.testing.assert_close(actual.detach().cpu().double(), wanted.detach(), rtol=0, atol=bound)
