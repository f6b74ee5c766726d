"""Operations of ATB, as torch_npu calls them, against the same formulas in float64."""

from typing import Any

import pytest
import torch
import torch_npu
from tests._values import assert_near
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16)
_HEADS, _SIZE, _BLOCK = 2, 16, 4
_SCALE = 0.3


def _attention(queries: Tensor, keys: Tensor, values: Tensor, is_kept: Tensor | None = None) -> Tensor:
    """Return the attention of one sequence, (tokens, heads, size)."""
    repeats = queries.size(1) // keys.size(1)
    transposed = [
        x.double().transpose(0, 1) for x in (queries, *(y.repeat_interleave(repeats, 1) for y in (keys, values)))
    ]
    attended = torch.nn.functional.scaled_dot_product_attention(*transposed, attn_mask=is_kept, scale=_SCALE)
    return attended.transpose(0, 1)


def _masked(is_kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask of ATB: what is added in float16, and 1 where a key is left out in bfloat16."""
    if dtype is torch.bfloat16:
        return (~is_kept).to(dtype)
    return torch.zeros(is_kept.shape, dtype=dtype).masked_fill(~is_kept, -torch.inf)


def _causal(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


class _Cache:
    """Keys and values of two sequences of 6 and 3 tokens, in blocks of a cache."""

    lengths = (6, 3)

    def __init__(self, dtype: torch.dtype) -> None:
        self.keys, self.values = torch.randn(2, 6, _BLOCK, _HEADS, _SIZE).to(dtype)
        self.table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)

    def of_sequence(self, index: int) -> list[Tensor]:
        blocks = self.table[index].long()
        return [cache[blocks].flatten(0, 1)[: self.lengths[index]] for cache in (self.keys, self.values)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_tokens_are_written_to_their_slots_and_negative_slots_are_left_out(dtype):
    keys, values = torch.randint(-100, 100, (2, 5, _HEADS, _SIZE)).to(dtype)
    caches = torch.zeros(2, 6, _BLOCK, _HEADS, _SIZE, dtype=dtype)
    key_cache, value_cache = caches.npu()
    slots = torch.tensor([3, 0, 7, -1, 20], dtype=torch.int32)
    torch_npu._npu_reshape_and_cache(keys.npu(), values.npu(), key_cache, value_cache, slots.npu())
    for cache, tokens in ((key_cache, keys), (value_cache, values)):
        expected = torch.zeros(24, _HEADS, _SIZE, dtype=dtype)
        expected[[3, 0, 7, 20]] = tokens[[0, 1, 2, 4]]
        torch.testing.assert_close(cache.cpu().flatten(0, 1), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_slots_are_int32(dtype):
    cache = torch.zeros(2, _BLOCK, 1, _SIZE, dtype=torch.float16).npu()
    slots = torch.tensor([1, 2, 0], dtype=dtype).npu()
    with pytest.raises(RuntimeError, match=f"slot_indices has dtype {str(dtype)[6:]} instead of int32"):
        torch_npu._npu_reshape_and_cache_siso(torch.zeros(3, 1, _SIZE).half().npu(), cache, slots)
        torch.npu.synchronize()


def test_keys_alone_are_written_to_their_slots():
    keys = torch.randn(3, 1, _SIZE, dtype=torch.float16)
    cache = torch.zeros(2, _BLOCK, 1, _SIZE, dtype=torch.float16).npu()
    torch_npu._npu_reshape_and_cache_siso(keys.npu(), cache, torch.tensor([7, 2, 0], dtype=torch.int32).npu())
    assert torch.equal(cache.cpu().flatten(0, 1)[[7, 2, 0]], keys)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_rotary_embeddings_turn_halves_or_neighbors(dtype, is_neox_style):
    size = 8
    positions = torch.tensor([0, 3, 1])
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.3, 0.1, 0.01]))
    # torch_npu keeps the first table that it is given, for the whole process.
    table = torch.cat([angles.cos(), angles.sin()], -1).half().to(dtype)
    query, key = torch.randn(3, 4 * size).to(dtype), torch.randn(3, 2 * size).to(dtype)
    on_npu = query.npu(), key.npu()
    torch_npu._npu_rotary_embedding(positions.npu(), *on_npu, size, table.npu(), is_neox_style)
    for actual, x in zip(on_npu, (query, key), strict=True):
        heads = x.double().view(3, -1, size)
        complex_heads = torch.complex(
            *(heads.chunk(2, -1) if is_neox_style else heads.unflatten(-1, (-1, 2)).unbind(-1))
        )
        turned = complex_heads * torch.polar(torch.ones(5, 4).double(), angles.double())[positions].unsqueeze(1)
        parts = turned.real, turned.imag
        expected = torch.cat(parts, -1) if is_neox_style else torch.stack(parts, -1).flatten(-2)
        # The table has been rounded.
        torch.testing.assert_close(actual.cpu().double(), expected.flatten(1), rtol=0.02, atol=0.03)


@pytest.mark.parametrize("query_heads", [_HEADS, 3 * _HEADS])
@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_sequences_one_after_the_other_attend_to_themselves(dtype, has_mask, query_heads):
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    queries = torch.randn(7, query_heads, _SIZE).to(dtype)
    keys, values = torch.randn(2, 7, _HEADS, _SIZE).to(dtype)
    out = torch.empty_like(queries).npu()
    tensors = [queries.npu(), keys.npu(), values.npu()]
    if has_mask:
        mask = _masked(_causal(8, 8), dtype).npu()
        torch_npu._npu_flash_attention(*tensors, mask, lengths, _SCALE, query_heads, _HEADS, out=out)
    else:
        torch_npu._npu_flash_attention_unpad(*tensors, lengths, _SCALE, query_heads, _HEADS, out=out)
    expected = [
        _attention(*sequence, _causal(len(sequence[0]), len(sequence[0])) if has_mask else None)
        for sequence in zip(*(x.split([3, 4]) for x in (queries, keys, values)), strict=True)
    ]
    assert_near(out, torch.cat(expected), units=2)


def _attended(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of bfloat16 tokens that attend to themselves by a mask, and that of a causal one."""
    tokens = torch.randn(3, 4, _HEADS, _SIZE).bfloat16()
    out, lengths = torch.empty_like(tokens[0]).npu(), torch.tensor([4], dtype=torch.int32)
    torch_npu._npu_flash_attention(*tokens.npu(), mask.npu(), lengths, _SCALE, _HEADS, _HEADS, out=out)
    torch.npu.synchronize()
    return out, _attention(*tokens, _causal(4, 4))


def test_minus_10000_leaves_out_in_bfloat16():
    assert_near(*_attended(torch.zeros(4, 4).masked_fill(~_causal(4, 4), -10000).bfloat16()), units=2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16])
def test_a_mask_has_the_dtype_of_the_query(dtype):
    with pytest.raises(RuntimeError, match="instead of that of query, BFloat16"):
        _attended((~_causal(4, 4)).to(dtype))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_queries_attend_to_a_cache_in_blocks(dtype):
    cache, queries = _Cache(dtype), torch.randn(2, 4, _SIZE).to(dtype)
    out = torch.empty_like(queries).npu()
    torch_npu._npu_paged_attention(
        queries.npu(), cache.keys.npu(), cache.values.npu(), _HEADS, 4, _SCALE, cache.table.npu(),
        torch.tensor(cache.lengths, dtype=torch.int32), out=out,
    )  # fmt: skip
    assert_near(out, torch.cat([_attention(queries[[i]], *cache.of_sequence(i)) for i in range(2)]), units=2)


def _attend_with_bias(bias: Tensor, cache: _Cache, queries: Tensor) -> Tensor:
    out = torch.empty_like(queries).npu()
    torch_npu.atb._npu_paged_attention_v2(
        queries.npu(), cache.keys.npu(), cache.table.npu(), cache.lengths, value_cache=cache.values.npu(),
        mask=bias.npu(), num_kv_heads=_HEADS, num_heads=4, scale_value=_SCALE, mask_type=2, out=out,
    )  # fmt: skip
    torch.npu.synchronize()
    return out


@pytest.mark.parametrize("shape", [(2, 4, 1, 8), (4, 1, 8)])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_bias_is_added_to_the_scores_of_each_head(dtype, shape):
    cache, queries, bias = _Cache(dtype), torch.randn(2, 4, _SIZE).to(dtype), torch.randn(shape).to(dtype)
    biases = [each[..., :length].double() for each, length in zip(bias.expand(2, 4, 1, 8), cache.lengths, strict=True)]
    expected = [_attention(queries[[i]], *cache.of_sequence(i), biases[i]) for i in range(2)]
    assert_near(_attend_with_bias(bias, cache, queries), torch.cat(expected), units=2)


@pytest.mark.parametrize("shape", [(2, 1, 1, 8), (1, 4, 1, 8), (1, 8)])
def test_a_bias_is_that_of_all_heads_and_sequences(shape):
    with pytest.raises(RuntimeError, match=r"mask has shape .* instead of \[sequences, 4, 1, keys\]"):
        _attend_with_bias(torch.zeros(shape).half(), _Cache(torch.float16), torch.zeros(2, 4, _SIZE).half())


@pytest.mark.parametrize("dtype", _DTYPES)
def test_values_may_be_the_first_elements_of_the_keys(dtype):
    cache, queries = _Cache(dtype), torch.randn(2, 4, _SIZE).to(dtype)
    out = torch.empty(2, 4, 8, dtype=dtype).npu()
    torch_npu._npu_paged_attention_mla(
        queries.npu(), cache.keys.npu(), _HEADS, 4, _SCALE, cache.table.npu(),
        torch.tensor(cache.lengths, dtype=torch.int32), 8, out=out,
    )  # fmt: skip
    keys = [cache.of_sequence(i)[0] for i in range(2)]
    assert_near(out, torch.cat([_attention(queries[[i]], keys[i], keys[i][..., :8]) for i in range(2)]), units=2)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_several_queries_of_a_sequence_attend_to_what_came_before_them(dtype):
    cache, rows = _Cache(dtype), (2, 3)
    queries = torch.randn(5, 4, _SIZE).to(dtype)
    kept = [_causal(rows[i], cache.lengths[i]) for i in range(2)]
    expected = torch.cat([_attention(queries.split(rows)[i], *cache.of_sequence(i), kept[i]) for i in range(2)])
    row_lengths, contexts = (torch.tensor(lengths, dtype=torch.int32) for lengths in (rows, cache.lengths))
    tensors = queries.npu(), cache.keys.npu(), cache.values.npu(), cache.table.npu()
    out = torch.empty_like(queries).npu()
    compressed = _masked(_causal(128, 128), dtype).npu()
    torch_npu._npu_flash_attention_qlens(*tensors, compressed, row_lengths, contexts, _HEADS, 4, _SCALE, out=out)
    assert_near(out, expected, units=2)
    of_rows = torch.cat([torch.nn.functional.pad(each, (0, 8 - each.size(1))) for each in kept])
    out = torch.empty_like(queries).npu()
    torch_npu._npu_paged_attention_splitfuse(
        *tensors, contexts, _masked(of_rows, dtype).npu(), row_lengths, _HEADS, 4, _SCALE, out=out
    )
    assert_near(out, expected, units=2)


def _latent(tokens: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the two parts of queries or keys, and values."""
    return tuple(torch.randn(tokens, heads, size).to(dtype) for size in (32, 16, 32))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_latent_attention_goes_on_with_further_keys(dtype):
    rows, contexts, mask = (4, 3), (5, 0), torch.ones(512, 512).triu(1).to(dtype).npu()
    query, own, before = _latent(7, 4, dtype), _latent(7, 2, dtype), _latent(5, 2, dtype)
    options = {"head_num": 4, "kv_head_num": 2, "qk_scale": _SCALE, "kernel_type": "kernel_type_high_precision"}
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
            found.append(_attention(part, k, v, _causal(len(part), len(k))))
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
    with pytest.raises(RuntimeError, match=message):
        torch_npu.atb.npu_ring_mla(
            *tensors, torch.ones(512, 512).half().npu(), torch.tensor(lengths, dtype=torch.int32), 2, 2, **options
        )
        torch.npu.synchronize()
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


def _latent_cache(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of latent attention to sequences of 6, 3 and no tokens in blocks of a cache."""
    return {
        "q_nope": torch.randn(3, 8, 512).to(dtype),
        "q_rope": torch.randn(3, 8, 64).to(dtype),
        "ctkv": torch.randn(6, _BLOCK, 1, 512).to(dtype),
        "k_rope": torch.randn(6, _BLOCK, 1, 64).to(dtype),
        "block_tables": torch.tensor([[3, 1], [0, 5], [2, 4]], dtype=torch.int32),
        "context_lens": [6, 3, 0],
        "q_headnum": 8,
        "qk_scale": 0.05,
        "kv_headnum": 1,
    }


def _on_npu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: each.npu() if isinstance(each, Tensor) else each for name, each in arguments.items()}


@pytest.mark.parametrize("dtype", _DTYPES)
def test_latent_attention_to_a_cache_of_two_parts(dtype):
    arguments = _latent_cache(dtype)
    result = torch_npu.atb.npu_multi_head_latent_attention(**_on_npu(arguments))
    with_sums = torch_npu.atb.npu_multi_head_latent_attention(
        **_on_npu(arguments), return_lse=True, calc_type="calc_type_ring"
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
    with pytest.raises(RuntimeError, match=f"ATB's MLA: .*{message}"):
        torch_npu.atb.npu_multi_head_latent_attention(**_on_npu(_latent_cache(torch.float16) | changed))
        torch.npu.synchronize()


def _prefix_arguments(dtype: torch.dtype) -> dict[str, Any]:
    keys, values = torch.randn(2, 5, 128, _HEADS, _SIZE).to(dtype)
    return {
        "query": torch.randn(5, 4, _SIZE).to(dtype),
        "key": keys,
        "value": values,
        "block_tables": torch.tensor([[3, 1], [0, 4]], dtype=torch.int32),
        "seqlen": [2, 3],
        "kv_seqlen": [130, 3],
        "q_headnum": 4,
        "qk_scale": _SCALE,
        "kv_headnum": _HEADS,
    }


@pytest.mark.parametrize("dtype", _DTYPES)
def test_queries_behind_a_prefix_attend_to_what_came_before_them(dtype):
    arguments = _prefix_arguments(dtype)
    result = torch_npu.atb.npu_self_attention_prefix_encoder(**_on_npu(arguments))
    expected = []
    for index, (rows, length) in enumerate(((2, 130), (3, 3))):
        blocks = arguments["block_tables"][index].long()
        keys, values = (arguments[name][blocks].flatten(0, 1)[:length] for name in ("key", "value"))
        queries = arguments["query"].split([2, 3])[index]
        expected.append(_attention(queries, keys, values, _causal(rows, length)))
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
    with pytest.raises(RuntimeError, match=message):
        torch_npu.atb.npu_self_attention_prefix_encoder(**_on_npu(_prefix_arguments(torch.float16) | changed))
        torch.npu.synchronize()


@pytest.mark.parametrize("cumulative", [False, True], ids=["lengths", "sums"])
def test_sequences_are_loaded_from_their_blocks(cumulative):
    cache = _Cache(torch.bfloat16)
    lengths = [0, 2, 5] if cumulative else [2, 3]
    keys, values = torch_npu.atb.npu_paged_cache_load(
        cache.keys.npu(), cache.values.npu(), cache.table.npu(), torch.tensor(lengths, dtype=torch.int32).npu(),
        seq_starts=torch.tensor([4, 0], dtype=torch.int32).npu(), cumsum=cumulative,
    )  # fmt: skip
    for loaded, whole in ((keys, cache.keys), (values, cache.values)):
        blocks = [whole[cache.table[index].long()].flatten(0, 1) for index in range(2)]
        assert torch.equal(loaded.cpu(), torch.cat([blocks[0][4:6], blocks[1][:3]]))


def test_a_captured_load_is_of_its_own_tensors():
    cache, graph = _Cache(torch.float16), torch.npu.NPUGraph()
    lengths = torch.tensor([2, 3], dtype=torch.int32).npu()
    caches = cache.keys.npu(), cache.values.npu(), cache.table.npu(), lengths
    # What a call before has loaded is not written again.
    before = torch_npu.atb.npu_paged_cache_load(*caches)
    loaded = [torch.zeros_like(each) for each in before]
    expected = [each.cpu() for each in before]
    with torch.npu.graph(graph):
        torch_npu.atb.npu_paged_cache_load(*caches, key=loaded[0], value=loaded[1])
    for each in (*before, *loaded):
        each.zero_()
    graph.replay()
    for each, found in zip(expected, loaded, strict=True):
        assert torch.equal(found.cpu(), each)
    assert not any(each.any() for each in before)


@pytest.mark.parametrize(
    ("form", "starts", "message"),
    [
        (29, None, "the host NPU takes no tensor in FRACTAL_NZ"),
        (2, torch.tensor([4]).int(), "seq_starts has 1 numbers for 2 sequences"),
        (2, torch.tensor([4, 0]), "seq_starts has dtype int64 instead of int32"),
    ],
    ids=["tiles", "a start", "int64"],
)
@pytest.mark.usefixtures("private_formats")
def test_sequences_that_cannot_be_loaded_are_refused(form, starts, message):
    blocks = torch_npu.npu_format_cast(torch.zeros(6, 16, 2, 16).half().npu(), form)
    table, lengths = torch.zeros(2, 1).int().npu(), torch.tensor([2, 3]).int().npu()
    with pytest.raises(RuntimeError, match=message):
        torch_npu.atb.npu_paged_cache_load(
            blocks, blocks, table, lengths, seq_starts=None if starts is None else starts.npu()
        )
        torch.npu.synchronize()
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


@pytest.mark.parametrize("n", [1, 2])
def test_scores_outside_the_largest_groups_become_zero(n):
    scores = torch.rand(5, 8, dtype=torch.float16)
    largest = scores.view(5, 4, 2).topk(n, -1).values.sum(-1).topk(2, -1).indices
    is_kept = torch.zeros(5, 4, dtype=torch.bool).scatter(1, largest, True).repeat_interleave(2, 1)
    on_npu = scores.npu()
    torch_npu._npu_group_topk(on_npu, k=2, group_num=4, n=n)
    torch.testing.assert_close(on_npu.cpu(), scores * is_kept, rtol=0, atol=0)


_EXPERTS: dict[str, Any] = {"group_num": 4, "group_topk": 2, "n": 2, "k": 3, "scale": 2.5}


@pytest.mark.parametrize("is_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *_DTYPES])
def test_experts_are_chosen_by_scores_with_a_bias_and_weigh_by_those_without(dtype, is_norm):
    x, bias = torch.randn(5, 16).to(dtype), torch.rand(16).to(dtype)
    weights, experts = torch_npu.atb.npu_fused_add_topk_div(x.npu(), bias.npu(), **_EXPERTS, is_norm=is_norm)
    scores = x.double().sigmoid()
    groups = (scores + bias).view(5, 4, 4)
    kept = groups.topk(2, -1).values.sum(-1).topk(2, -1).indices
    is_kept = torch.zeros(5, 4, dtype=torch.bool).scatter(1, kept, True).unsqueeze(-1)
    chosen = (groups * is_kept).flatten(1).topk(3, -1).indices
    expected = scores.gather(1, chosen)
    assert torch.equal(experts.cpu(), chosen.int())
    assert_near(weights, expected / expected.sum(-1, keepdim=True) * 2.5 if is_norm else expected, units=4)


def test_of_equal_experts_the_first_are_chosen():
    x, bias = torch.zeros(1, 16).npu(), torch.zeros(16).npu()
    assert torch_npu.atb.npu_fused_add_topk_div(x, bias, **_EXPERTS)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_mapping": True}, "enable_expert_mapping is True; the host NPU takes False only"),
        ({"group_num": 3}, "group_num is 3 for 16 experts"),
        ({"group_topk": 5}, "group_topk is 5 instead of 1 to 4"),
        ({"n": 2**16 + 1}, "n is 65537 instead of 1 to 4"),
        ({"k": 17}, "k is 17 instead of 1 to 16"),
        ({"add_num": torch.zeros(16).half()}, r"add_num has dtype Half and shape \[16\] instead of Float and \[16\]"),
        ({"x": torch.zeros(5, 2, 16)}, r"x has shape \[5, 2, 16\] instead of \[tokens, experts\]"),
    ],
)
def test_a_choice_of_experts_that_does_not_fit_is_refused(options, message):
    arguments = {"x": torch.zeros(5, 16), "add_num": torch.zeros(16)} | _EXPERTS | options
    with pytest.raises(RuntimeError, match=f"ATB's FusedAddTopkDiv: {message}"):
        torch_npu.atb.npu_fused_add_topk_div(**_on_npu(arguments))
        torch.npu.synchronize()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_product_is_added_to_a_float32_gradient(dtype):
    x, weight, gradient = torch.randn(3, 6).to(dtype), torch.randn(3, 4).to(dtype), torch.randn(6, 4)
    on_npu = gradient.npu()
    torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), on_npu)
    torch.testing.assert_close(on_npu.cpu(), gradient + x.float().T @ weight.float())


@pytest.mark.parametrize("has_offset", [True, False])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_columns_are_quantized_by_their_scales(dtype, has_offset):
    x, scale = torch.randn(2, 5, 16).to(dtype), (torch.rand(5, 16) / 9 + 0.01).to(dtype)
    offset = torch.randint(-10, 10, (5, 16) if has_offset else (0,), dtype=torch.int8)
    y = torch.zeros(2, 5, 16, dtype=torch.int8).npu()
    torch_npu._npu_quantize_per_tensor(x.npu(), scale.npu(), offset.npu(), y)
    exact = x.double() / scale.double() + (offset if has_offset else 0)
    assert (y.cpu() - exact.clamp(-128, 127)).abs().max() < 0.501


def _norm_arguments(dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    return {
        "self": torch.randn(3, 2, 32).to(dtype),
        "gamma": torch.randn(1, 32).to(dtype),
        "beta": torch.randn(1, 32).to(dtype),
        "scale": torch.tensor([0.03]).to(dtype),
        "offset": torch.tensor([-7], dtype=torch.int8),
        "output": torch.zeros(3, 2, 32, dtype=torch.int8),
    }


@pytest.mark.parametrize("dtype", _DTYPES)
def test_rows_are_normalized_and_quantized(dtype):
    x, gamma, beta, scale, offset, y = (each.npu() for each in _norm_arguments(dtype).values())
    torch_npu._npu_quant_rms_norm(x, gamma, beta, scale, offset, y, eps=0.1)
    normal = torch.nn.functional.rms_norm(x.cpu().double(), (32,), gamma[0].cpu().double(), 0.1)
    exact = (normal + beta.cpu()) / scale.cpu().double() + offset.cpu()
    assert (y.cpu() - exact.clamp(-128, 127)).abs().max() < 0.501


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("self", torch.zeros(3, 2, 32), "self has dtype Float and shape .* ATB takes float16 or bfloat16"),
        ("self", torch.zeros(3, 2, 24).half(), "shape .*24.* rows of a multiple of 16 elements"),
        ("gamma", torch.zeros(3, 32).half(), r"gamma has .*\[3, 32\] instead of Half and \[32\]"),
        ("beta", torch.zeros(32).half(), r"beta has .*\[32\] instead of Half and \[1, 32\]"),
        ("scale", torch.ones(32).half(), r"scale has .*\[32\] instead of Half and \[1\]"),
        ("offset", torch.zeros(1).int(), r"offset has dtype Int .* instead of Char and \[1\]"),
        ("output", torch.zeros(6, 32).char(), r"output has .*\[6, 32\] instead of Char and \[3, 2, 32\]"),
    ],
)
def test_a_quantized_norm_of_wrong_arguments_is_refused(name, value, message):
    with pytest.raises(RuntimeError, match=f"ATB's RmsNorm: .*{message}"):
        torch_npu._npu_quant_rms_norm(*(each.npu() for each in (_norm_arguments() | {name: value}).values()))
        torch.npu.synchronize()


def _call_with(lengths: Tensor) -> None:
    tensors = torch.randn(3, 7, _HEADS, _SIZE, dtype=torch.float16).npu()
    out = torch.empty(7, _HEADS, _SIZE, dtype=torch.float16).npu()
    torch_npu._npu_flash_attention_unpad(*tensors, lengths, _SCALE, _HEADS, _HEADS, out=out)
    torch.npu.synchronize()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([3, 5], dtype=torch.int32), "the lengths are those of 8 tokens, and query has 7"),
        (torch.tensor([7], dtype=torch.int32).npu(), "must be CPU tensors"),
        (torch.tensor([7]), "seq_len has dtype int64 instead of int32"),
    ],
    ids=["too many tokens", "on the NPU", "int64"],
)
def test_lengths_that_do_not_fit_are_refused_and_the_queue_goes_on(lengths, message):
    with pytest.raises(RuntimeError, match=message):
        _call_with(lengths)
    _call_with(torch.tensor([3, 4], dtype=torch.int32))
    assert (torch.ones(2).npu() + 1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ((7, 2), (8, 2), r"value has shape \[8, 2, 16\], which does not have the tokens of key, of shape \[7, 2, 16\]"),
        ((9, 2), (9, 2), "the lengths are those of 7 tokens, and key has 9"),
        ((7, 4), (7, 2), r"key of shape \[7, 4, 16\] is not made of 2 heads"),
        ((7, 2), (7, 4), r"value of shape \[7, 4, 16\] is not made of 2 heads"),
    ],
    ids=["values", "lengths", "heads of keys", "heads of values"],
)
def test_keys_and_values_have_to_fit(keys, values, message):
    query, key, value = (torch.zeros(*shape, 16).half().npu() for shape in ((7, 4), keys, values))
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        torch_npu._npu_flash_attention_unpad(query, key, value, lengths, _SCALE, 4, 2, out=torch.empty_like(query))
        torch.npu.synchronize()
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


def test_a_cache_of_values_has_the_blocks_of_the_keys():
    cache = _Cache(torch.float16)
    query = torch.zeros(2, 4, _SIZE).half().npu()
    with pytest.raises(RuntimeError, match="which does not have the tokens of key"):
        torch_npu._npu_paged_attention(
            query, cache.keys.npu(), cache.values[1:].npu(), _HEADS, 4, _SCALE, cache.table.npu(),
            torch.tensor(cache.lengths, dtype=torch.int32), out=torch.empty_like(query),
        )  # fmt: skip
        torch.npu.synchronize()


def test_caches_have_the_same_blocks():
    keys = torch.zeros(3, _HEADS, _SIZE).half().npu()
    caches = (torch.zeros(blocks, _BLOCK, _HEADS, _SIZE).half().npu() for blocks in (2, 3))
    with pytest.raises(RuntimeError, match="value_cache .* does not have the blocks of key_cache"):
        torch_npu._npu_reshape_and_cache(keys, keys, *caches, torch.tensor([7, 2, 0], dtype=torch.int32).npu())
        torch.npu.synchronize()


def _nothing(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).npu()


_SLOTS = {"dtype": torch.int32}
# Of no tokens; and of caches that have none.
_EMPTY_CALLS = {
    "cache": lambda: torch_npu._npu_reshape_and_cache(
        *(_nothing(0, 2, 16),) * 2, *(_nothing(4, 4, 2, 16),) * 2, _nothing(0, **_SLOTS)
    ),
    "cache of no blocks": lambda: torch_npu._npu_reshape_and_cache(
        *(_nothing(0, 2, 16),) * 2, *(_nothing(0, 4, 2, 16),) * 2, _nothing(0, **_SLOTS)
    ),
    "attention": lambda: torch_npu._npu_flash_attention_unpad(
        *(_nothing(0, 2, 16),) * 3, torch.zeros(1, **_SLOTS), _SCALE, 2, 2, out=_nothing(0, 2, 16)
    ),
}


@pytest.mark.parametrize("name", _EMPTY_CALLS)
def test_no_tokens_are_computed(name):
    _EMPTY_CALLS[name]()
    torch.npu.synchronize()


def test_a_sequence_may_have_no_tokens():
    x = torch.randn(3, 3, 2, _SIZE, dtype=torch.float16)
    out = torch.empty_like(x[0]).npu()
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    torch_npu._npu_flash_attention_unpad(*x.npu(), lengths, _SCALE, 2, 2, out=out)
    assert_near(out, _attention(*x), units=2)


def test_blocks_have_tokens():
    with pytest.raises(RuntimeError, match="a sequence of 0 tokens does not fit a cache of shape"):
        torch_npu._npu_paged_attention(
            _nothing(1, 4, 16), *(_nothing(6, 0, 2, 16),) * 2, 2, 4, _SCALE, _nothing(1, 2, **_SLOTS),
            torch.zeros(1, **_SLOTS), out=_nothing(1, 4, 16),
        )  # fmt: skip
        torch.npu.synchronize()
