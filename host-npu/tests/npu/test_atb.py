"""Operations of ATB, as torch_npu calls them, against their formulas in float64."""

import pytest
import torch
import torch_npu
from tests._atb import BLOCK, DTYPES, HEADS, SCALE, SIZE, attention, causal
from tests._values import assert_near, refused
from torch import Tensor


def _masked(is_kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask in ATB's format: additive in float16, and 1 for masked keys in bfloat16."""
    if dtype is torch.bfloat16:
        return (~is_kept).to(dtype)
    return torch.zeros(is_kept.shape, dtype=dtype).masked_fill(~is_kept, -torch.inf)


class _Cache:
    """Keys and values of two sequences of 6 and 3 tokens, in blocks of a cache."""

    lengths = (6, 3)

    def __init__(self, dtype: torch.dtype) -> None:
        self.keys, self.values = torch.randn(2, 6, BLOCK, HEADS, SIZE).to(dtype)
        self.table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)

    def of_sequence(self, index: int) -> list[Tensor]:
        blocks = self.table[index].long()
        return [cache[blocks].flatten(0, 1)[: self.lengths[index]] for cache in (self.keys, self.values)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_tokens_are_written_to_their_slots_and_negative_slots_are_left_out(dtype):
    keys, values = torch.randint(-100, 100, (2, 5, HEADS, SIZE)).to(dtype)
    caches = torch.zeros(2, 6, BLOCK, HEADS, SIZE, dtype=dtype)
    key_cache, value_cache = caches.npu()
    slots = torch.tensor([3, 0, 7, -1, 20], dtype=torch.int32)
    torch_npu._npu_reshape_and_cache(keys.npu(), values.npu(), key_cache, value_cache, slots.npu())
    for cache, tokens in ((key_cache, keys), (value_cache, values)):
        expected = torch.zeros(24, HEADS, SIZE, dtype=dtype)
        expected[[3, 0, 7, 20]] = tokens[[0, 1, 2, 4]]
        torch.testing.assert_close(cache.cpu().flatten(0, 1), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_slots_are_int32(dtype):
    cache = torch.zeros(2, BLOCK, 1, SIZE, dtype=torch.float16).npu()
    slots = torch.tensor([1, 2, 0], dtype=dtype).npu()
    with refused(f"slot_indices has dtype {str(dtype)[6:]} instead of int32"):
        torch_npu._npu_reshape_and_cache_siso(torch.zeros(3, 1, SIZE).half().npu(), cache, slots)


def test_keys_alone_are_written_to_their_slots():
    keys = torch.randn(3, 1, SIZE, dtype=torch.float16)
    cache = torch.zeros(2, BLOCK, 1, SIZE, dtype=torch.float16).npu()
    torch_npu._npu_reshape_and_cache_siso(keys.npu(), cache, torch.tensor([7, 2, 0], dtype=torch.int32).npu())
    assert torch.equal(cache.cpu().flatten(0, 1)[[7, 2, 0]], keys)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embeddings_turn_halves_or_neighbors(dtype, is_neox_style):
    size = 8
    positions = torch.tensor([0, 3, 1])
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.3, 0.1, 0.01]))
    # torch_npu keeps the first table of a process.
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
        # The table is rounded.
        torch.testing.assert_close(actual.cpu().double(), expected.flatten(1), rtol=0.02, atol=0.03)


@pytest.mark.parametrize("query_heads", [HEADS, 3 * HEADS])
@pytest.mark.parametrize("masks", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_one_after_the_other_attend_to_themselves(dtype, masks, query_heads):
    """Without a mask, with one for all sequences, or with one per sequence."""
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    queries = torch.randn(7, query_heads, SIZE).to(dtype)
    keys, values = torch.randn(2, 7, HEADS, SIZE).to(dtype)
    out = torch.empty_like(queries).npu()
    tensors = [queries.npu(), keys.npu(), values.npu()]
    kept = torch.stack([causal(8, 8), causal(8, 8) | (torch.arange(8) == 1)])[-masks:]
    if masks:
        mask = _masked(kept if masks == 2 else kept[0], dtype).npu()
        torch_npu._npu_flash_attention(*tensors, mask, lengths, SCALE, query_heads, HEADS, out=out)
    else:
        torch_npu._npu_flash_attention_unpad(*tensors, lengths, SCALE, query_heads, HEADS, out=out)
    expected = [
        attention(*sequence, kept[index % masks, : len(sequence[0]), : len(sequence[0])] if masks else None)
        for index, sequence in enumerate(zip(*(x.split([3, 4]) for x in (queries, keys, values)), strict=True))
    ]
    assert_near(out, torch.cat(expected), units=2)


def _attended(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of bfloat16 self-attention with a mask, and that of causal self-attention."""
    tokens = torch.randn(3, 4, HEADS, SIZE).bfloat16()
    out, lengths = torch.empty_like(tokens[0]).npu(), torch.tensor([4], dtype=torch.int32)
    torch_npu._npu_flash_attention(*tokens.npu(), mask.npu(), lengths, SCALE, HEADS, HEADS, out=out)
    torch.npu.synchronize()
    return out, attention(*tokens, causal(4, 4))


def test_minus_10000_leaves_out_in_bfloat16():
    assert_near(*_attended(torch.zeros(4, 4).masked_fill(~causal(4, 4), -10000).bfloat16()), units=2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16])
def test_a_mask_has_the_dtype_of_the_query(dtype):
    with pytest.raises(RuntimeError, match="instead of that of query, BFloat16"):
        _attended((~causal(4, 4)).to(dtype))


@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (1, 2, 4, 4), (2, 4, 4)])
def test_a_mask_is_that_of_all_sequences_or_there_is_one_for_each(shape):
    with pytest.raises(RuntimeError, match=r"mask has shape .* instead of \[rows, keys\] or \[sequences, rows, keys\]"):
        _attended(torch.zeros(shape).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_attend_to_a_cache_in_blocks(dtype):
    cache, queries = _Cache(dtype), torch.randn(2, 4, SIZE).to(dtype)
    out = torch.empty_like(queries).npu()
    torch_npu._npu_paged_attention(
        queries.npu(), cache.keys.npu(), cache.values.npu(), HEADS, 4, SCALE, cache.table.npu(),
        torch.tensor(cache.lengths, dtype=torch.int32), out=out,
    )  # fmt: skip
    assert_near(out, torch.cat([attention(queries[[i]], *cache.of_sequence(i)) for i in range(2)]), units=2)


def _attend_with_bias(bias: Tensor, cache: _Cache, queries: Tensor) -> Tensor:
    out = torch.empty_like(queries).npu()
    torch_npu.atb._npu_paged_attention_v2(
        queries.npu(), cache.keys.npu(), cache.table.npu(), cache.lengths, value_cache=cache.values.npu(),
        mask=bias.npu(), num_kv_heads=HEADS, num_heads=4, scale_value=SCALE, mask_type=2, out=out,
    )  # fmt: skip
    torch.npu.synchronize()
    return out


@pytest.mark.parametrize("shape", [(2, 4, 1, 8), (4, 1, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_to_the_scores_of_each_head(dtype, shape):
    cache, queries, bias = _Cache(dtype), torch.randn(2, 4, SIZE).to(dtype), torch.randn(shape).to(dtype)
    biases = [each[..., :length].double() for each, length in zip(bias.expand(2, 4, 1, 8), cache.lengths, strict=True)]
    expected = [attention(queries[[i]], *cache.of_sequence(i), biases[i]) for i in range(2)]
    assert_near(_attend_with_bias(bias, cache, queries), torch.cat(expected), units=2)


@pytest.mark.parametrize("shape", [(2, 1, 1, 8), (1, 4, 1, 8), (1, 8)])
def test_a_bias_is_that_of_all_heads_and_sequences(shape):
    with pytest.raises(RuntimeError, match=r"mask has shape .* instead of \[sequences, 4, 1, keys\]"):
        _attend_with_bias(torch.zeros(shape).half(), _Cache(torch.float16), torch.zeros(2, 4, SIZE).half())


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_may_be_the_first_elements_of_the_keys(dtype):
    cache, queries = _Cache(dtype), torch.randn(2, 4, SIZE).to(dtype)
    out = torch.empty(2, 4, 8, dtype=dtype).npu()
    torch_npu._npu_paged_attention_mla(
        queries.npu(), cache.keys.npu(), HEADS, 4, SCALE, cache.table.npu(),
        torch.tensor(cache.lengths, dtype=torch.int32), 8, out=out,
    )  # fmt: skip
    keys = [cache.of_sequence(i)[0] for i in range(2)]
    assert_near(out, torch.cat([attention(queries[[i]], keys[i], keys[i][..., :8]) for i in range(2)]), units=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_queries_of_a_sequence_attend_to_what_came_before_them(dtype):
    cache, rows = _Cache(dtype), (2, 3)
    queries = torch.randn(5, 4, SIZE).to(dtype)
    kept = [causal(rows[i], cache.lengths[i]) for i in range(2)]
    expected = torch.cat([attention(queries.split(rows)[i], *cache.of_sequence(i), kept[i]) for i in range(2)])
    row_lengths, contexts = (torch.tensor(lengths, dtype=torch.int32) for lengths in (rows, cache.lengths))
    tensors = queries.npu(), cache.keys.npu(), cache.values.npu(), cache.table.npu()
    out = torch.empty_like(queries).npu()
    compressed = _masked(causal(128, 128), dtype).npu()
    torch_npu._npu_flash_attention_qlens(*tensors, compressed, row_lengths, contexts, HEADS, 4, SCALE, out=out)
    assert_near(out, expected, units=2)
    of_rows = torch.cat([torch.nn.functional.pad(each, (0, 8 - each.size(1))) for each in kept])
    out = torch.empty_like(queries).npu()
    torch_npu._npu_paged_attention_splitfuse(
        *tensors, contexts, _masked(of_rows, dtype).npu(), row_lengths, HEADS, 4, SCALE, out=out
    )
    assert_near(out, expected, units=2)


@pytest.mark.parametrize("cumulative", [False, True], ids=["lengths", "sums"])
def test_sequences_are_loaded_from_the_blocks_of_their_starts(cumulative):
    cache = _Cache(torch.bfloat16)
    lengths = [0, 2, 5] if cumulative else [2, 3]
    keys, values = torch_npu.atb.npu_paged_cache_load(
        cache.keys.npu(), cache.values.npu(), cache.table.npu(), torch.tensor(lengths, dtype=torch.int32).npu(),
        seq_starts=torch.tensor([5, 3], dtype=torch.int32).npu(), cumsum=cumulative,
    )  # fmt: skip
    for loaded, whole in ((keys, cache.keys), (values, cache.values)):
        blocks = [whole[cache.table[index].long()].flatten(0, 1) for index in range(2)]
        assert torch.equal(loaded.cpu(), torch.cat([blocks[0][4:6], blocks[1][:3]]))


def test_a_captured_load_is_of_its_own_tensors():
    cache, graph = _Cache(torch.float16), torch.npu.NPUGraph()
    lengths = torch.tensor([2, 3], dtype=torch.int32).npu()
    caches = cache.keys.npu(), cache.values.npu(), cache.table.npu(), lengths
    # Tokens loaded by an earlier call are not written again.
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
    with refused(message):
        torch_npu.atb.npu_paged_cache_load(
            blocks, blocks, table, lengths, seq_starts=None if starts is None else starts.npu()
        )


def _call_with(lengths: Tensor) -> None:
    tensors = torch.randn(3, 7, HEADS, SIZE, dtype=torch.float16).npu()
    out = torch.empty(7, HEADS, SIZE, dtype=torch.float16).npu()
    torch_npu._npu_flash_attention_unpad(*tensors, lengths, SCALE, HEADS, HEADS, out=out)
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
    with refused(message):
        torch_npu._npu_flash_attention_unpad(query, key, value, lengths, SCALE, 4, 2, out=torch.empty_like(query))


def test_a_cache_of_values_has_the_blocks_of_the_keys():
    cache = _Cache(torch.float16)
    query = torch.zeros(2, 4, SIZE).half().npu()
    with refused("which does not have the tokens of key"):
        torch_npu._npu_paged_attention(
            query, cache.keys.npu(), cache.values[1:].npu(), HEADS, 4, SCALE, cache.table.npu(),
            torch.tensor(cache.lengths, dtype=torch.int32), out=torch.empty_like(query),
        )  # fmt: skip


def test_caches_have_the_same_blocks():
    keys = torch.zeros(3, HEADS, SIZE).half().npu()
    caches = (torch.zeros(blocks, BLOCK, HEADS, SIZE).half().npu() for blocks in (2, 3))
    with refused("value_cache .* does not have the blocks of key_cache"):
        torch_npu._npu_reshape_and_cache(keys, keys, *caches, torch.tensor([7, 2, 0], dtype=torch.int32).npu())


def _nothing(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).npu()


_SLOTS = {"dtype": torch.int32}
# Calls without tokens, and with empty caches.
_EMPTY_CALLS = {
    "cache": lambda: torch_npu._npu_reshape_and_cache(
        *(_nothing(0, 2, 16),) * 2, *(_nothing(4, 4, 2, 16),) * 2, _nothing(0, **_SLOTS)
    ),
    "cache of no blocks": lambda: torch_npu._npu_reshape_and_cache(
        *(_nothing(0, 2, 16),) * 2, *(_nothing(0, 4, 2, 16),) * 2, _nothing(0, **_SLOTS)
    ),
    "attention": lambda: torch_npu._npu_flash_attention_unpad(
        *(_nothing(0, 2, 16),) * 3, torch.zeros(1, **_SLOTS), SCALE, 2, 2, out=_nothing(0, 2, 16)
    ),
}


@pytest.mark.parametrize("name", _EMPTY_CALLS)
def test_no_tokens_are_computed(name):
    _EMPTY_CALLS[name]()
    torch.npu.synchronize()


def test_a_sequence_may_have_no_tokens():
    x = torch.randn(3, 3, 2, SIZE, dtype=torch.float16)
    out = torch.empty_like(x[0]).npu()
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    torch_npu._npu_flash_attention_unpad(*x.npu(), lengths, SCALE, 2, 2, out=out)
    assert_near(out, attention(*x), units=2)


def test_blocks_have_tokens():
    with refused("a sequence of 0 tokens does not fit a cache of shape"):
        torch_npu._npu_paged_attention(
            _nothing(1, 4, 16), *(_nothing(6, 0, 2, 16),) * 2, 2, 4, SCALE, _nothing(1, 2, **_SLOTS),
            torch.zeros(1, **_SLOTS), out=_nothing(1, 4, 16),
        )  # fmt: skip
