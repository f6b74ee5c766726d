"""Latent attention of ATB, and attention with a prefix, against their formulas in float64."""

from typing import Any

import pytest
import torch
import torch_npu
from tests._atb import BLOCK, DTYPES, HEADS, SCALE, SIZE, attention, causal
from tests._values import assert_near, moved, refused
from torch import Tensor


def _latent(tokens: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the two parts of queries or keys, and values."""
    return tuple(torch.randn(tokens, heads, size).to(dtype) for size in (32, 16, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_goes_on_with_further_keys(dtype):
    rows, contexts, mask = (4, 3), (5, 0), torch.ones(512, 512).triu(1).to(dtype).npu()
    query, own, before = _latent(7, 4, dtype), _latent(7, 2, dtype), _latent(5, 2, dtype)
    options = {"head_num": 4, "kv_head_num": 2, "qk_scale": SCALE, "kernel_type": "kernel_type_high_precision"}
    queries = [each.npu() for each in query[:2]]
    lengths = torch.tensor(rows, dtype=torch.int32)
    result, log_sum = torch_npu.atb.npu_ring_mla(
        *queries, *(each.npu() for each in own), mask, lengths,
        **options, mask_type="mask_type_triu", calc_type="calc_type_first_ring",
    )  # fmt: skip
    q, k, earlier = (torch.cat(each[:2], -1).double() for each in (query, own, before))

    def expected(*keys: tuple[Tensor, Tensor, tuple[int, ...]]) -> Tensor:
        found, parts = [], [each.split(lengths) for *both, lengths in keys for each in both]
        for part, *rest in zip(q.split(rows), *parts, strict=True):
            k, v = torch.cat(rest[::2]), torch.cat(rest[1::2])
            found.append(attention(part, k, v, causal(len(part), len(k))))
        return torch.cat(found)

    assert_near(result, expected((k, own[2].double(), rows)), units=2)
    torch_npu.atb.npu_ring_mla(
        *queries, *(each.npu() for each in before), mask, torch.tensor([rows, contexts], dtype=torch.int32),
        pre_out=result, prev_lse=log_sum, **options, mask_type="no_mask", calc_type="calc_type_default",
        output=result, softmax_lse=log_sum,
    )  # fmt: skip
    assert_near(result, expected((earlier, before[2].double(), contexts), (k, own[2].double(), rows)), units=4)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([4, 2], {}, "seqlen is for 6 queries and 6 keys"),
        ([[4, 3], [3, 4]], {"mask_type": "mask_type_triu"}, "mask_type_triu of as many queries as keys only"),
        ([4, 3], {"calc_type": "calc_type_default"}, "calc_type_default needs pre_out and prev_lse"),
    ],
    ids=["lengths", "mask", "no result before"],
)
def test_latent_attention_that_does_not_fit_is_refused(lengths, options, message):
    tensors = [each.npu() for each in (*_latent(7, 2, torch.float16)[:2], *_latent(7, 2, torch.float16))]
    with refused(message):
        torch_npu.atb.npu_ring_mla(
            *tensors, torch.ones(512, 512).half().npu(), torch.tensor(lengths, dtype=torch.int32), 2, 2, **options
        )


def _latent_cache(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of latent attention over sequences of 6, 3 and no tokens in blocks of a cache."""
    return {
        "q_nope": torch.randn(3, 8, 512).to(dtype),
        "q_rope": torch.randn(3, 8, 64).to(dtype),
        "ctkv": torch.randn(6, BLOCK, 1, 512).to(dtype),
        "k_rope": torch.randn(6, BLOCK, 1, 64).to(dtype),
        "block_tables": torch.tensor([[3, 1], [0, 5], [2, 4]], dtype=torch.int32),
        "context_lens": [6, 3, 0],
        "q_headnum": 8,
        "qk_scale": 0.05,
        "kv_headnum": 1,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_to_a_cache_of_two_parts(dtype):
    arguments = _latent_cache(dtype)
    result = torch_npu.atb.npu_multi_head_latent_attention(**moved(arguments))
    with_sums = torch_npu.atb.npu_multi_head_latent_attention(
        **moved(arguments), return_lse=True, calc_type="calc_type_ring"
    )
    query, cache = (
        torch.cat([arguments[name].double() for name in names], -1)
        for names in (("q_nope", "q_rope"), ("ctkv", "k_rope"))
    )
    for index, length in enumerate(arguments["context_lens"][:2]):
        keys = cache[arguments["block_tables"][index].long()].flatten(0, 2)[:length]
        scores = query[index] @ keys.T * 0.05
        for found in (result, with_sums[0]):
            assert_near(found[index], scores.softmax(-1) @ keys[:, :512], units=2)
        assert_near(with_sums[1][index], scores.logsumexp(-1, True), units=2)
    assert not result[2].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask_type": "mask_type_spec"}, "mask_type 1 .* takes krope_ctkv .1., undefined .0."),
        ({"qseqlen": [1, 1, 1]}, "1 of qseqlen, qk_descale and pv_descale are given"),
        ({"qk_descale": torch.ones(8)}, "1 of qseqlen, qk_descale and pv_descale are given"),
        ({"cache_mode": "nzcache"}, "cache_mode is 3"),
        ({"calc_type": "calc_type_ring"}, "calc_type_ring .2. needs lse"),
        ({"kv_headnum": 2}, "kv_headnum is 2 instead of 1"),
        ({"context_lens": [9, 3, 0]}, "does not have the blocks of 4 of 9 tokens"),
        ({"context_lens": [6, 3]}, r"q_nope has .*\[3, 8, 512\] instead of Half and \[2, 8, 512\]"),
        ({"k_rope": torch.zeros(6, 4, 1, 32).half()}, r"k_rope has .* instead of Half and \[6, 4, 1, 64\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_latent_attention_to_a_cache_that_does_not_fit_is_refused(changed, message):
    with refused(f"ATB's MLA: .*{message}"):
        torch_npu.atb.npu_multi_head_latent_attention(**moved(_latent_cache(torch.float16) | changed))


def _prefix_arguments(dtype: torch.dtype) -> dict[str, Any]:
    keys, values = torch.randn(2, 5, 128, HEADS, SIZE).to(dtype)
    return {
        "query": torch.randn(5, 4, SIZE).to(dtype),
        "key": keys,
        "value": values,
        "block_tables": torch.tensor([[3, 1], [0, 4]], dtype=torch.int32),
        "seqlen": [2, 3],
        "kv_seqlen": [130, 3],
        "q_headnum": 4,
        "qk_scale": SCALE,
        "kv_headnum": HEADS,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_behind_a_prefix_attend_to_what_came_before_them(dtype):
    arguments = _prefix_arguments(dtype)
    result = torch_npu.atb.npu_self_attention_prefix_encoder(**moved(arguments))
    expected = []
    for index, (rows, length) in enumerate(((2, 130), (3, 3))):
        blocks = arguments["block_tables"][index].long()
        keys, values = (arguments[name][blocks].flatten(0, 1)[:length] for name in ("key", "value"))
        queries = arguments["query"].split([2, 3])[index]
        expected.append(attention(queries, keys, values, causal(rows, length)))
    assert_near(result, torch.cat(expected), units=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask_type": "mask_type_alibi_compress"}, "mask_type is 4; the host NPU takes mask_type_causal_mask .9."),
        ({"kv_seqlen": [131, 3]}, r"kv_seqlen less seqlen is \[129, 0\]; ATB takes multiples of 128"),
        ({"seqlen": [2, 2]}, "the lengths are those of 4 tokens, and query has 5"),
    ],
    ids=["mask", "prefix", "lengths"],
)
def test_a_prefix_that_does_not_fit_is_refused(changed, message):
    with refused(message):
        torch_npu.atb.npu_self_attention_prefix_encoder(**moved(_prefix_arguments(torch.float16) | changed))
