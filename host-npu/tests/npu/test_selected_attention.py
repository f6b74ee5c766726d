"""Attention to selected blocks of keys (native sparse attention) on the host NPU, against its formula in float64."""

from typing import Any

import pytest
import torch
import torch_npu
from tests._values import assert_near, moved, refused
from torch import Tensor

_SCALE, _SIZE, _COUNT = 0.1, 16, 3
_QUERIES, _KEYS = (3, 40), (64, 48)


def _arguments(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Return the arguments of a call, with other blocks for each query and head of keys."""
    query, key, value = (
        torch.randn(sum(lengths), heads, size).to(dtype)
        for lengths, heads, size in ((_QUERIES, 4, 192), (_KEYS, 2, 192), (_KEYS, 2, 128))
    )
    # Some blocks appear twice.
    blocks = [torch.randint(0, k // _SIZE, (q, 2, _COUNT)) for q, k in zip(_QUERIES, _KEYS, strict=True)]
    return {
        "query": query,
        "key": key,
        "value": value,
        "topk_indices": torch.cat(blocks).int(),
        "scale_value": _SCALE,
        "head_num": 4,
        "select_block_size": _SIZE,
        "select_block_count": _COUNT,
        "actual_seq_qlen": [3, 43],
        "actual_seq_kvlen": [64, 112],
    }


def _expected(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, is_causal: bool) -> Tensor:
    rows = []
    for lengths in zip(_QUERIES, _KEYS, strict=True):
        own = [x[: lengths[at]] for at, x in ((0, query), (1, key), (1, value), (0, blocks))]
        query, key, value, blocks = (x[lengths[at] :] for at, x in ((0, query), (1, key), (1, value), (0, blocks)))
        for number in range(lengths[0]):
            heads = []
            for head in range(4):
                chosen = (own[3][number, head // 2].long()[:, None] * _SIZE + torch.arange(_SIZE)).flatten()
                if is_causal:
                    chosen = chosen[chosen <= number]
                scores = own[0][number, head] @ own[1][chosen, head // 2].T * _SCALE
                heads.append(scores.softmax(-1) @ own[2][chosen, head // 2])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_query_attends_to_the_blocks_of_its_heads(dtype, is_causal):
    arguments = _arguments(dtype)
    names = "query", "key", "value"
    exact = [arguments[name].double().requires_grad_() for name in names]
    on_npu = moved(arguments) | {name: arguments[name].npu().requires_grad_() for name in names}
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if is_causal else None
    result, maximum, total = torch_npu.npu_nsa_select_attention(**on_npu, atten_mask=mask)
    expected = _expected(*exact, arguments["topk_indices"], is_causal)
    assert_near(result, expected, units=2)
    assert maximum.shape == total.shape == (43, 4, 8)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (result * weights.to(dtype).npu()).sum().backward()
    tolerance = 2e-2 if dtype is torch.float16 else 0.1
    for name, wanted in zip(names, exact, strict=True):
        torch.testing.assert_close(on_npu[name].grad.cpu().double(), wanted.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"select_block_size": 24}, "selectedBlockSize is 24 and selectedBlockCount 3; CANN takes multiples of 16"),
        ({"select_block_count": 2}, r"topkIndices has shape \[43, 2, 3\], and selectedBlockCount is 2"),
        ({"head_num": 2}, "headNum is 2, and query and key have 4 and 2 heads"),
        ({"actual_seq_kvlen": [40, 112]}, "a sequence has 40 keys; CANN takes multiples of selectedBlockSize, 16"),
        ({"actual_seq_qlen": [43]}, "actualSeqQLen has 1 numbers and actualSeqKvLen 2"),
        ({"atten_mask": torch.zeros(43, 112, dtype=torch.bool)}, "attenMask has shape .* takes .2048, 2048. with 2"),
        ({"value": torch.zeros(112, 2, 192).half()}, r"value has shape \[112, 2, 192\] instead of \[T2, N2, 128\]"),
        ({"query": torch.zeros(43, 4, 192)}, "query has dtype float32 instead of float16 or bfloat16"),
    ],
    ids=["size", "count", "heads", "keys", "sequences", "mask", "value", "dtype"],
)
def test_what_cann_does_not_select_is_refused_at_the_call(changed, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_nsa_select_attention(**moved(_arguments() | changed))


def test_a_block_is_one_of_the_sequence():
    arguments = _arguments()
    arguments["topk_indices"][42, 1, 0] = 3
    with refused("topkIndices"):
        torch_npu.npu_nsa_select_attention(**moved(arguments))
