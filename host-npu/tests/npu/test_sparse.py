"""Sparse NPU tensors: aclnnCoalesceSparse adds entries with the same index."""

import pytest
import torch
from torch import Tensor, nn

_PLACES = torch.tensor([[3, 1, 1, 0, 3], [0, 2, 2, 1, 0]])


def _sparse(values: Tensor, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    return torch.sparse_coo_tensor(_PLACES, values, (*shape, *values.shape[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("dense", [(), (2,)], ids=["numbers", "rows"])
def test_a_coalesced_tensor_is_that_of_the_cpu(dtype, dense):
    values = torch.arange(5 * (2 if dense else 1)).view(5, *dense).to(dtype)
    actual, expected = _sparse(values).npu().coalesce(), _sparse(values).coalesce()
    assert actual.is_coalesced() and actual.dtype == dtype
    assert torch.equal(actual.indices().cpu(), expected.indices())
    assert torch.equal(actual.values().cpu(), expected.values())


def test_large_integers_are_added_exactly():
    values = torch.full((5,), 2**24 + 1, dtype=torch.int32)
    assert torch.equal(_sparse(values).npu().coalesce().values().cpu(), _sparse(values).coalesce().values())


@pytest.mark.parametrize("count", [0, 1])
def test_a_tensor_without_two_entries_is_coalesced(count):
    sparse = torch.sparse_coo_tensor(_PLACES[:, :count], torch.ones(count), (4, 3))
    assert torch.equal(sparse.npu().coalesce().to_dense().cpu(), sparse.to_dense())


_OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_embeddings_with_sparse_gradients_are_trained(name):
    has_product = torch._C._dispatch_has_kernel_for_dispatch_key("aten::mul.out", "SparsePrivateUse1")
    if name == "Adagrad" and not has_product:
        pytest.skip("torch_npu 2.9 does not multiply sparse tensors")

    def trained(device: str) -> Tensor:
        embedding = nn.Embedding(9, 3, sparse=True)
        nn.init.ones_(embedding.weight)
        embedding = embedding.to(device)
        optimizer = _OPTIMIZERS[name](list(embedding.parameters()))
        for _ in range(2):
            embedding(torch.tensor([1, 1, 4], device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return embedding.weight.detach().cpu()

    torch.testing.assert_close(trained("npu"), trained("cpu"))
