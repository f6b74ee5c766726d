"""Permutation of tokens by a routing map on the host NPU, against loops over the map."""

import pytest
import torch
import torch_npu
from tests._values import backward, leaves, refused

_TOKENS, _CHOICES, _EXPERTS, _SIZE = 6, 2, 4, 8
_ROWS = _TOKENS * _CHOICES


def _map():
    chosen = torch.rand(_TOKENS, _EXPERTS).argsort(-1)[:, :_CHOICES]
    return torch.zeros(_TOKENS, _EXPERTS, dtype=torch.bool).scatter(1, chosen, True)


def _pairs(map, padded):
    """Return the token and the expert of each row."""
    if not padded:
        return [(token, expert) for expert in range(_EXPERTS) for token in range(_TOKENS) if map[token, expert]]
    capacity = _ROWS // _EXPERTS
    found = []
    for expert in range(_EXPERTS):
        order = sorted(range(_TOKENS), key=lambda token, expert=expert: not map[token, expert])
        found += [(token, expert) for token in order[:capacity]]
    return found


def _tokens_of_experts():
    return torch.stack([torch.randperm(_TOKENS)[: _ROWS // _EXPERTS] for _ in range(_EXPERTS)]).flatten()


_PADDED = pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])


@_PADDED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_map_gives_rows_expert_after_expert(padded, dtype):
    tokens, map, probs = torch.randn(_TOKENS, _SIZE).to(dtype), _map(), torch.rand(_TOKENS, _EXPERTS).to(dtype)
    on_npu, reference = leaves(tokens, probs)
    rows, permuted_probs, index = torch_npu.npu_moe_token_permute_with_routing_map(
        on_npu[0], map.npu(), probs=on_npu[1], num_out_tokens=_ROWS, drop_and_pad=padded
    )
    of_token, of_expert = torch.tensor(_pairs(map, padded)).t()
    expected, expected_probs = reference[0][of_token], reference[1][of_token, of_expert]
    assert rows.cpu().double().equal(expected) and permuted_probs.cpu().double().equal(expected_probs)
    assert index.tolist() == (of_token if padded else of_token.argsort(stable=True)).tolist()
    weight, weight_of_probs = torch.randn(rows.shape).to(dtype), torch.randn(_ROWS).to(dtype)
    torch.autograd.backward([rows, permuted_probs], [weight.npu(), weight_of_probs.npu()])
    torch.autograd.backward([expected, expected_probs], [weight.double(), weight_of_probs.double()])
    for actual, wanted in zip(on_npu, reference, strict=True):
        torch.testing.assert_close(actual.grad.cpu(), wanted.grad.to(dtype))


@_PADDED
@pytest.mark.parametrize("weighted", [False, True], ids=["", "with probs"])
def test_the_rows_of_a_map_come_back_as_sums(weighted, padded):
    rows, map, probs = torch.randn(_ROWS, _SIZE), _map(), torch.rand(_TOKENS, _EXPERTS)
    on_npu, reference = leaves(rows, probs)
    of_token, of_expert = torch.tensor(_pairs(map, padded)).t()
    index = of_token if padded else of_token.argsort(stable=True)
    options = {"probs": on_npu[1] if weighted else None, "routing_map": map.npu(), "drop_and_pad": padded}
    unpermute = torch_npu.npu_moe_token_unpermute_with_routing_map
    result = unpermute(on_npu[0], index.int().npu(), [_TOKENS, _SIZE], **options)
    each = reference[0] * reference[1][of_token, of_expert][:, None] if weighted else reference[0]
    expected = torch.zeros(_TOKENS, _SIZE, dtype=torch.float64).index_add(0, of_token, each)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=2e-6, atol=2e-6)
    backward(result, expected)
    for actual, wanted in list(zip(on_npu, reference, strict=True))[: 2 if weighted else 1]:
        torch.testing.assert_close(actual.grad.cpu().double(), wanted.grad, rtol=2e-6, atol=2e-6)


@_PADDED
def test_probs_are_those_of_the_indices(padded):
    """With a capacity, the indices are the experts' tokens; without, a token's rows are in the order of its experts."""
    rows, map, probs = torch.randn(_ROWS, _SIZE), _map(), torch.rand(_TOKENS, _EXPERTS)
    on_npu, reference = leaves(rows, probs)
    if padded:
        index = _tokens_of_experts()
        of_token, order = index, torch.arange(_ROWS)
        of_expert = torch.arange(_EXPERTS).repeat_interleave(_ROWS // _EXPERTS)
    else:
        index = order = torch.randperm(_ROWS)
        of_token, of_expert = map.nonzero().t()
    result, _, _, permuted_probs = torch_npu._npu_moe_token_unpermute_with_routing_map(
        on_npu[0], index.int().npu(), [_TOKENS, _SIZE], probs=on_npu[1], routing_map=map.npu(), drop_and_pad=padded
    )
    weights = reference[1][of_token, of_expert]
    assert permuted_probs.cpu().double().equal(weights)
    each = reference[0][order] * weights[:, None]
    expected = torch.zeros(_TOKENS, _SIZE, dtype=torch.float64).index_add(0, of_token, each)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=2e-6, atol=2e-6)
    backward(result, expected)
    for actual, wanted in zip(on_npu, reference, strict=True):
        torch.testing.assert_close(actual.grad.cpu().double(), wanted.grad, rtol=2e-6, atol=2e-6)


def test_an_index_outside_of_the_rows_ends_the_operator():
    index = torch.arange(_ROWS, dtype=torch.int32)
    index[2] = -1
    with refused(f"sortedIndices has the index -1; CANN takes 0 to {_ROWS - 1}"):
        torch_npu.npu_moe_token_unpermute_with_routing_map(
            torch.randn(_ROWS, _SIZE).npu(), index.npu(), [_TOKENS, _SIZE]
        )


@_PADDED
def test_gradients_go_to_the_tokens_of_the_indices(padded):
    rows, map, of_probs = torch.randn(_ROWS, _SIZE), _map(), torch.randn(_ROWS)
    of_token, of_expert = torch.tensor(_pairs(map, padded)).t()
    if padded:
        index = of_token = _tokens_of_experts()
        order = torch.arange(_ROWS)
    else:
        index = order = torch.randperm(_ROWS)
    tokens, probs = torch_npu.npu_moe_token_permute_with_routing_map_grad(
        rows.npu(), of_probs.npu(), index.int().npu(), map.npu(), _EXPERTS, _TOKENS, padded
    )
    sums_of = of_token if padded else torch.arange(_ROWS) // _CHOICES
    torch.testing.assert_close(tokens.cpu(), torch.zeros(_TOKENS, _SIZE).index_add(0, sums_of, rows[order]))
    assert probs.cpu().equal(torch.zeros(_TOKENS, _EXPERTS).index_put((of_token, of_expert), of_probs))
