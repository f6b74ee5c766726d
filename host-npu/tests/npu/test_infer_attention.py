"""Attention for inference on the host NPU, against its formula in float64: layouts, lengths, blocks, statistics."""

import re

import pytest
import torch
import torch_npu
from tests._values import assert_near, called
from torch import Tensor

_TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
_HEADS, _QUERIES, _KEYS, _SCALE = 4, 6, 9, 0.3
_LAYOUTS = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
}


def _attention(query: Tensor, key: Tensor, value: Tensor, left_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    groups = query.size(-3) // key.size(-3)
    scores = query @ key.repeat_interleave(groups, -3).mT * _SCALE
    if left_out is not None:
        scores = scores.masked_fill(left_out, -torch.inf)
    return scores.softmax(-1) @ value.repeat_interleave(groups, -3), scores.logsumexp(-1, keepdim=True)


def _causal(queries: int, keys: int) -> Tensor:
    """Return the causal mask where the last query attends to all keys."""
    return torch.arange(keys) - torch.arange(queries)[:, None] > keys - queries


def _inputs(heads_of_keys: int, dtype: torch.dtype = torch.float16, queries: int = _QUERIES) -> list[Tensor]:
    sizes = (_HEADS, queries), (heads_of_keys, _KEYS), (heads_of_keys, _KEYS)
    return [torch.randn(2, heads, length, 16).to(dtype) for heads, length in sizes]


def _prompt(*inputs: Tensor, input_layout: str = "BNSD", **options) -> tuple[Tensor, None]:
    options = {"num_heads": _HEADS, "scale_value": _SCALE, "input_layout": input_layout} | options
    return called(torch_npu.npu_prompt_flash_attention, *inputs, **options), None


def _fused(*inputs: Tensor, input_layout: str = "BNSD", **options) -> tuple[Tensor, Tensor]:
    named = {"num_heads": _HEADS, "scale": _SCALE, "input_layout": input_layout, "softmax_lse_flag": True}
    return called(torch_npu.npu_fused_infer_attention_score, *inputs, **named | options)


def _fused_v2(*inputs: Tensor, input_layout: str = "BNSD", **options) -> tuple[Tensor, Tensor]:
    names = {"actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen"}
    options = {names.get(name, name): value for name, value in options.items()}
    options = {"num_query_heads": _HEADS, "softmax_scale": _SCALE, "input_layout": input_layout} | options
    return called(torch_npu.npu_fused_infer_attention_score_v2, *inputs, return_softmax_lse=True, **options)


def _cumulated(lengths: tuple[int, ...]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def _ends(queries: list[int], keys: list[int]) -> dict[str, object]:
    """Return the options of packed sequences with these ends."""
    return {"input_layout": "TND", "actual_seq_lengths": queries, "actual_seq_lengths_kv": keys}


_OF_MANY = pytest.mark.parametrize("operator", [_prompt, _fused, _fused_v2])
_FUSED = pytest.mark.parametrize("operator", [_fused, _fused_v2])


@_OF_MANY
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("heads_of_keys", [1, 2, 4])
def test_each_layout_takes_shared_heads(operator, layout, heads_of_keys):
    inputs = _inputs(heads_of_keys)
    result, lse = operator(
        *[_LAYOUTS[layout](each).contiguous() for each in inputs],
        input_layout=layout,
        num_key_value_heads=heads_of_keys,
    )
    expected, statistic = _attention(*[each.double() for each in inputs])
    assert_near(result, _LAYOUTS[layout](expected))
    if lse is not None:
        assert_near(lse, statistic)


@_OF_MANY
def test_a_result_may_have_another_layout(operator):
    inputs = _inputs(4)
    result, _ = operator(*inputs, input_layout="BNSD_BSND")
    assert_near(result, _attention(*[each.double() for each in inputs])[0].transpose(1, 2))


@_FUSED
@pytest.mark.parametrize("layout", ["BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "BSH_BNSD", "BSND_BNSD"])
def test_results_may_begin_with_the_heads(operator, layout):
    inputs = _inputs(4)
    tensors = [_LAYOUTS[layout[:-5]](each).contiguous() for each in inputs]
    result, lse = operator(*tensors, input_layout=layout)
    expected, statistic = _attention(*[each.double() for each in inputs])
    assert_near(result, expected.transpose(0, 1) if layout.endswith("NBSD") else expected)
    assert_near(lse, statistic)


@_FUSED
@pytest.mark.parametrize("layout", ["TND_NTD", "NTD_TND", "NTD"])
def test_packed_results_may_have_another_layout(operator, layout):
    inputs = [torch.randn(6, heads, 64).half() for heads in (_HEADS, 2, 2)]
    ropes = [torch.randn(6, heads, 64).half() for heads in (_HEADS, 2)]
    given = [each.transpose(0, 1).contiguous() if layout.startswith("NTD") else each for each in (*inputs, *ropes)]
    options = _ends([2, 6], [2, 6]) | {"input_layout": layout, "num_key_value_heads": 2}
    result, _ = operator(*given[:3], query_rope=given[3], key_rope=given[4], **options)
    query, key = (torch.cat(pair, -1) for pair in zip(inputs, ropes, strict=False))
    parts = zip(*[each.double().transpose(0, 1).split([2, 4], 1) for each in (query, key, inputs[2])], strict=True)
    expected = torch.cat([_attention(*part)[0] for part in parts], 1)
    assert_near(result, expected if layout.endswith("NTD") else expected.transpose(0, 1))


@_OF_MANY
def test_one_batch_needs_no_dimension(operator):
    inputs = [each[0] for each in _inputs(4)]
    result, _ = operator(*inputs, input_layout="NSD")
    assert_near(result, _attention(*[each.double() for each in inputs])[0])


@_OF_MANY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_round_once(operator, dtype):
    inputs = _inputs(4, dtype)
    result, _ = operator(*inputs)
    assert_near(result, _attention(*[each.double() for each in inputs])[0])


@_OF_MANY
@pytest.mark.parametrize("mode", [0, 1, 3])
def test_what_is_past_the_lengths_is_left_out(operator, mode):
    inputs, lengths = _inputs(2), ((3, 9), (6, 7))
    # The modes 0 and 1 take a mask for whole batches.
    mask = (
        _TRIANGLE if mode == 3 else torch.stack([torch.arange(_KEYS).expand(_QUERIES, -1) % 4 == at for at in (1, 2)])
    )
    result, lse = operator(
        *inputs,
        num_key_value_heads=2,
        atten_mask=mask,
        sparse_mode=mode,
        actual_seq_lengths=[3, 6],
        actual_seq_lengths_kv=[9, 7],
        next_tokens=2147483647,
    )
    for batch, (queries, keys) in enumerate(lengths):
        query, key, value = (each[batch].double() for each in inputs)
        left_out = _causal(queries, keys) if mode == 3 else mask[batch, :queries, :keys]
        expected, statistic = _attention(query[:, :queries], key[:, :keys], value[:, :keys], left_out)
        assert_near(result[batch, :, :queries], expected)
        assert not result[batch, :, queries:].any()
        if lse is not None:
            assert_near(lse[batch, :, :queries], statistic)
            assert lse[batch, :, queries:].isposinf().all()


@_OF_MANY
def test_pse_is_added_after_the_scale(operator):
    inputs = _inputs(4)
    pse = torch.randn(1, _HEADS, _QUERIES, _KEYS).half()
    result, _ = operator(*inputs, pse_shift=pse)
    query, key, value = (each.double() for each in inputs)
    assert_near(result, (query @ key.mT * _SCALE + pse).softmax(-1) @ value)


@_FUSED
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize(
    "lengths", [((3, 5), (6, 6), (2, 4)), ((0, 0), (3, 5), (0, 4), (0, 0), (2, 4))], ids=["as long", "empty ones"]
)
def test_packed_sequences_attend_to_themselves_only(operator, mode, lengths):
    queries, keys = zip(*lengths, strict=True)
    query = torch.randn(sum(queries), _HEADS, 16).half()
    key, value = (torch.randn(sum(keys), 2, 16).half() for _ in range(2))
    options = {"num_key_value_heads": 2, "atten_mask": _TRIANGLE if mode else None, "sparse_mode": mode}
    result, lse = operator(query, key, value, **_ends(*map(_cumulated, (queries, keys))), **options)
    results, statistics = [], []
    for part in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        q, k, v = (each.double().transpose(0, 1) for each in part)
        each = _attention(q, k, v, _causal(q.size(1), k.size(1)) if mode else None)
        results.append(each[0].transpose(0, 1))
        statistics.append(each[1].transpose(0, 1))
    assert_near(result, torch.cat(results))
    assert_near(lse, torch.cat(statistics))


@pytest.mark.parametrize("lengths", [((3, 5), (4, 0)), ((4, 0), (3, 5))], ids=str)
def test_queries_of_a_packed_sequence_without_keys_have_the_result_0(lengths):
    queries, keys = zip(*lengths, strict=True)
    query = torch.randn(sum(queries), _HEADS, 16).half()
    key, value = (torch.randn(sum(keys), _HEADS, 16).half() for _ in range(2))
    result, _ = _fused(query, key, value, softmax_lse_flag=False, **_ends(*map(_cumulated, (queries, keys))))
    for q, length, own in zip(query.split(queries), keys, result.split(queries), strict=True):
        inputs = [each.double().transpose(0, 1) for each in (q, key, value)]
        expected = _attention(*inputs)[0] if length else torch.zeros(_HEADS, *q.shape[::2], dtype=torch.double)
        assert_near(own, expected.transpose(0, 1))


def _blocks(x: Tensor, table: Tensor, form: str) -> Tensor:
    """Store keys [batch, heads, tokens, size] in blocks of 4 tokens."""
    blocks = torch.full((8, x.size(1), 4, x.size(3)), torch.nan, dtype=x.dtype)
    filled = torch.nn.functional.pad(x, (0, 0, 0, -x.size(2) % 4)).unflatten(2, (-1, 4))
    for batch, numbers in enumerate(table):
        blocks[numbers] = filled[batch].transpose(0, 1)
    if form == "tiles of columns":
        return blocks.unflatten(-1, (-1, 16)).transpose(2, 3)
    return blocks if form == "heads first" else blocks.transpose(1, 2).flatten(2)


_TABLE = torch.tensor([[5, 0, 3], [1, 7, 2]], dtype=torch.int32)
_IN_BLOCKS = {"num_key_value_heads": 2, "block_table": _TABLE, "block_size": 4}


@_FUSED
@pytest.mark.parametrize("form", ["heads first", "heads joined", "tiles of columns"])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_block_table_says_where_keys_are(operator, form, queries):
    inputs = _inputs(2, queries=queries)
    ropes = [torch.randn(*each.shape[:3], 64).half() for each in inputs[:2]]
    key, value, key_rope = (_blocks(each, _TABLE, form) for each in (*inputs[1:], ropes[1]))
    options = {"query_rope": ropes[0], "key_rope": key_rope, "actual_seq_lengths_kv": [9, 6]}
    result, _ = operator(inputs[0], key, value, **_IN_BLOCKS, **options)
    for batch, length in enumerate((9, 6)):
        query, key = (torch.cat(pair, -1)[batch].double() for pair in zip(inputs, ropes, strict=False))
        value = inputs[2][batch].double()
        assert_near(result[batch], _attention(query, key[:, :length], value[:, :length])[0])


@_FUSED
def test_packed_queries_take_a_block_table_with_a_length_each(operator):
    inputs = _inputs(2)
    query = torch.cat([inputs[0][0, :, :1], inputs[0][1]], 1).transpose(0, 1)
    keys = [_blocks(each, _TABLE, "heads joined") for each in inputs[1:]]
    options = _ends([1, 7], [9, 7]) | {"atten_mask": _TRIANGLE, "sparse_mode": 3}
    result, _ = operator(query.contiguous(), *keys, **_IN_BLOCKS, **options)
    for batch, (rows, length) in enumerate(((slice(0, 1), 9), (slice(1, 7), 7))):
        q = query[rows].double().transpose(0, 1)
        key, value = (each[batch].double()[:, :length] for each in inputs[1:])
        expected, _ = _attention(q, key, value, _causal(q.size(1), length))
        assert_near(result[rows], expected.transpose(0, 1))


@_FUSED
def test_rope_adds_a_product_of_its_own(operator):
    inputs = _inputs(2)
    ropes = [torch.randn(*each.shape[:3], 64).half() for each in inputs[:2]]
    result, _ = operator(*inputs, num_key_value_heads=2, query_rope=ropes[0], key_rope=ropes[1])
    query, key = (torch.cat(pair, -1).double() for pair in zip(inputs, ropes, strict=False))
    assert_near(result, _attention(query, key, inputs[2].double())[0])


def test_a_learnable_sink_takes_a_part_of_the_softmax():
    inputs, sink = _inputs(4), torch.randn(_HEADS).half()
    options = {"num_query_heads": _HEADS, "softmax_scale": _SCALE, "input_layout": "BNSD", "learnable_sink": sink}
    result = called(torch_npu.npu_fused_infer_attention_score_v2, *inputs, **options)[0]
    query, key, value = (each.double() for each in inputs)
    scores = torch.cat([query @ key.mT * _SCALE, sink.double().view(-1, 1, 1).expand(2, -1, _QUERIES, 1)], -1)
    assert_near(result, scores.softmax(-1)[..., :-1] @ value)


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        (_HEADS, "no learnableSink with softmaxLse"),
        (3, f"learnableSink has 3 elements instead of one for each of {_HEADS} heads"),
    ],
)
def test_a_learnable_sink_of_other_heads_or_with_the_sums_is_refused(heads, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        _fused_v2(*_inputs(4), learnable_sink=torch.randn(heads).half())


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_an_increment_is_one_query_with_the_lengths_of_its_keys(layout):
    inputs = _inputs(2, queries=1)
    mask = torch.arange(_KEYS).expand(2, -1) == 3
    options = {"num_heads": _HEADS, "num_key_value_heads": 2, "scale_value": _SCALE, "input_layout": layout}
    options |= {"atten_mask": mask, "actual_seq_lengths": [9, 6]}
    given = [_LAYOUTS[layout](each).contiguous() for each in inputs]
    result = called(torch_npu.npu_incre_flash_attention, *given, **options)
    for batch, length in enumerate((9, 6)):
        query, key, value = (each[batch].double() for each in inputs)
        expected, _ = _attention(query, key[:, :length], value[:, :length], mask[batch, :length])
        assert_near(result[batch], _LAYOUTS[layout](expected[None])[0])


@_FUSED
def test_a_band_does_not_concern_a_single_query(operator):
    inputs, mask = _inputs(2, queries=1), torch.arange(_KEYS).expand(2, 1, -1) == 3
    result, _ = operator(*inputs, num_key_value_heads=2, atten_mask=mask, pre_tokens=2, next_tokens=0)
    assert_near(result, _attention(*[each.double() for each in inputs], mask[:, None])[0])
    with pytest.raises(RuntimeError, match="no sparse mode 2 of a single query, which CANN ignores: use 0"):
        operator(*inputs, atten_mask=_TRIANGLE, sparse_mode=2)


@_FUSED
def test_heads_of_several_queries_are_multiples_of_16(operator):
    query, keys = torch.randn(2, _HEADS, 3, 24).half(), torch.randn(2, _HEADS, _KEYS, 24).half()
    with pytest.raises(RuntimeError, match=r"query of shape \[2, 4, 3, 24\] has heads of 24 elements; CANN takes mul"):
        operator(query, keys, keys)
    result, _ = operator(query[:, :, :1], keys, keys)
    assert result.shape == (2, _HEADS, 1, 24)


@_FUSED
def test_the_sparse_mode_of_one_query_has_no_effect_without_a_mask(operator):
    query, keys = torch.randn(2, _HEADS, 1, 16).half(), torch.randn(2, _HEADS, _KEYS, 16).half()
    expected, _ = operator(query, keys, keys)
    result, _ = operator(query, keys, keys, sparse_mode=3)
    assert result.equal(expected)


@_FUSED
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sparse_mode": 2}, "the sparse mode 2 needs a mask, attenMask"),
        ({"num_key_value_heads": 3}, "numKeyValueHeads is 3, which does not divide numHeads, 4"),
        ({"num_key_value_heads": 2}, "numKeyValueHeads is 2, and key of shape .* does not have as many heads"),
        ({"actual_seq_lengths_kv": [9, 12]}, r"actualSeqLengthsKv is \[9, 12\]; CANN takes 0 to 9 tokens"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, "needs the lengths of the keys"),
    ],
    ids=["no mask", "heads", "heads of keys", "lengths", "a block table without lengths"],
)
def test_what_is_not_computed_is_refused_at_the_call(operator, options, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        operator(*_inputs(4), **options)
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


@pytest.mark.parametrize("name", ["quant_scale2", "dequant_scale1", "key_antiquant_scale", "kv_padding_size"])
def test_quantization_and_padding_are_refused_at_the_call(name):
    with pytest.raises(RuntimeError, match="without (quantization|padding sizes) only"):
        _fused(*_inputs(4), **{name: torch.ones(1)})


def _half(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16, device="npu")


@_FUSED
@pytest.mark.parametrize("block_size", [0, 7, 16])
def test_the_size_of_blocks_is_that_of_the_cache(operator, block_size):
    query, key, value = (_half(shape) for shape in ((2, _HEADS, _QUERIES, 16), (8, 4, 32), (8, 4, 32)))
    sentence = rf"blockSize is {block_size}, and a block of key of shape \[8, 4, 32\] has 4 tokens"
    with pytest.raises(RuntimeError, match=sentence):
        operator(query, key, value, **_IN_BLOCKS | {"block_size": block_size, "actual_seq_lengths_kv": [9, 6]})


def _in_blocks(block_size: int, tokens: int = 16) -> Tensor:
    inputs = (_half(shape) for shape in ((2, _HEADS, 1, 16), (8, tokens, 32), (8, tokens, 32)))
    options = {"num_heads": _HEADS, "input_layout": "BNSD", "actual_seq_lengths": [9, 6], "block_size": block_size}
    return called(torch_npu.npu_incre_flash_attention, *inputs, **_IN_BLOCKS | options)


@pytest.mark.parametrize(
    ("block_size", "tokens", "sentence"),
    [
        (7, 16, "blockSize is 7; CANN takes the multiples of 16 up to 512"),
        (0, 16, "blockSize is 0; CANN"),
        (528, 528, "blockSize is 528; CANN"),
        (32, 16, r"blockSize is 32, and a block of key of shape \[8, 16, 32\] has 16 tokens"),
    ],
)
def test_an_increment_takes_blocks_of_a_multiple_of_16_tokens(block_size, tokens, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        _in_blocks(block_size, tokens)
    assert _in_blocks(16).eq(0).all()


@_FUSED
@pytest.mark.parametrize(
    ("ends", "ends_of_keys", "sentence"),
    [
        ([2, 6], [2, 5], "actualSeqLengthsKv is [2, 5] for key of shape [6, 2, 16]; CANN takes where each sequence"),
        ([4, 2], [2, 6], "actualSeqLengths is [4, 2] for query of shape [6, 4, 16]; CANN takes where each sequence"),
        ([6], [2, 6], "actualSeqLengths has 1 numbers and actualSeqLengthsKv 2"),
    ],
    ids=["fewer keys", "decreasing", "another number"],
)
def test_sequences_have_to_fit_the_tokens(operator, ends, ends_of_keys, sentence):
    inputs = [torch.zeros(6, heads, 16, dtype=torch.float16, device="npu") for heads in (_HEADS, 2, 2)]
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        operator(*inputs, num_key_value_heads=2, **_ends(ends, ends_of_keys))
