"""Filtering of logits before sampling on the host NPU, against loops over the rows."""

import pytest
import torch
import torch_npu

_TOKENS = 50


def _left(row, p, k):
    """Return the tokens of a row that are kept: the most likely ones until their probability exceeds p."""
    order = row.argsort(descending=True).tolist()[:k]
    probabilities = row[order].softmax(-1).tolist()
    left, total = set(), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if total < p:
            left.add(token)
        total += probability
    return left


@pytest.mark.parametrize("with_p", [False, True])
@pytest.mark.parametrize("with_k", [False, True])
def test_the_largest_logits_are_left(with_p, with_k):
    logits = torch.randn(4, _TOKENS)
    p, k = torch.tensor([0.1, 0.5, 0.9, 1.0]), torch.tensor([1, 7, 20, _TOKENS], dtype=torch.int32)
    result = torch_npu.npu_top_k_top_p(logits.npu(), p.npu() if with_p else None, k.npu() if with_k else None).cpu()
    for row in range(4):
        expected = torch.full((_TOKENS,), float("-inf"))
        left = _left(logits[row].double(), p[row].item() if with_p else 2, k[row].item() if with_k else _TOKENS)
        expected[list(left)] = logits[row, list(left)]
        assert torch.equal(result[row], expected)
