"""torch_npu's operators for mixtures of experts on the host NPU, against plain indexing in float64."""

import math

import pytest
import torch
import torch_npu
from tests._values import assert_gradients, assert_near, backward, refused

_TOKENS, _CHOICES, _EXPERTS, _SIZE = 7, 3, 5, 16


def _experts():
    return torch.rand(_TOKENS, _EXPERTS).argsort(-1)[:, :_CHOICES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [None, 12], ids=["all", "the first 12"])
def test_tokens_are_permuted_in_the_order_of_their_experts(kept, dtype):
    experts = _experts()
    tokens = torch.randn(_TOKENS, _SIZE).to(dtype)
    on_npu, reference = tokens.npu().requires_grad_(), tokens.double().requires_grad_()
    permuted, places = torch_npu.npu_moe_token_permute(on_npu, experts.npu(), kept)
    order = experts.flatten().argsort(stable=True)
    expected = reference[order[: kept or order.numel()] // _CHOICES]
    assert torch.equal(permuted.cpu().double(), expected)
    assert places.tolist() == order.argsort().tolist()
    backward(permuted, expected)
    torch.testing.assert_close(on_npu.grad.cpu(), reference.grad.to(dtype))


def test_tokens_come_back_weighted():
    permuted = torch.randn(_TOKENS * _CHOICES, _SIZE)
    weights = torch.rand(_TOKENS, _CHOICES)
    places = torch.randperm(_TOKENS * _CHOICES)
    on_npu = [permuted.npu().requires_grad_(), weights.npu().requires_grad_()]
    reference = [permuted.double().requires_grad_(), weights.double().requires_grad_()]
    result = torch_npu.npu_moe_token_unpermute(on_npu[0], places.int().npu(), on_npu[1])
    expected = (reference[0][places].unflatten(0, (_TOKENS, _CHOICES)) * reference[1][..., None]).sum(1)
    assert_near(result, expected)
    assert_gradients(result, expected, on_npu, reference)


def test_tokens_come_back_as_they_were_without_weights():
    permuted = torch.randn(_TOKENS, _SIZE)
    places = torch.randperm(_TOKENS)
    on_npu, reference = permuted.npu().requires_grad_(), permuted.double().requires_grad_()
    result = torch_npu.npu_moe_token_unpermute(on_npu, places.int().npu())
    assert torch.equal(result.cpu(), permuted[places])
    backward(result, reference[places])
    assert_near(on_npu.grad, reference.grad)


@pytest.mark.parametrize("index", [-3, _TOKENS, 1000])
def test_places_outside_of_the_tokens_end_the_operator(index):
    places = torch.arange(_TOKENS, dtype=torch.int32)
    places[2] = index
    with refused(f"sortedIndices has the index {index}; CANN takes 0 to {_TOKENS - 1}"):
        torch_npu.npu_moe_token_unpermute(torch.randn(_TOKENS, _SIZE).npu(), places.npu())


def test_a_place_of_a_copy_that_was_left_out_is_0():
    rows, places = torch.randn(_TOKENS - 2, _SIZE), torch.randperm(_TOKENS, dtype=torch.int32)
    result = torch_npu.npu_moe_token_unpermute(rows.npu(), places.npu())
    assert result.cpu().equal(torch.cat([rows, torch.zeros(2, _SIZE)])[places])


def test_copies_that_were_left_out_or_weigh_nothing_have_no_effect():
    rows = torch.tensor([[1.0], [2.0], [math.nan]]).npu()
    weights = torch.tensor([[1.0, 1], [1, 0]]).npu()
    result = torch_npu.npu_moe_token_unpermute(rows, torch.tensor([0, 3, 1, 2]).int().npu(), weights)
    assert result.tolist() == [[1], [2]]


def test_a_padded_permutation_is_refused_at_the_call():
    with pytest.raises(RuntimeError, match="padded"):
        torch_npu.npu_moe_token_permute(torch.randn(_TOKENS, _SIZE).npu(), _experts().npu(), padded_mode=True)
