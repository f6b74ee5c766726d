"""Sparse attention to chosen keys on the host NPU, against its formula in float64."""

import pytest
import torch
import torch_npu
from tests._values import assert_near
from torch import Tensor

_SIZE, _ROPE, _SCALE = 512, 64, 0.06


def _inputs(queries: int, keys: int, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return the queries and keys of a sequence, and the rotated parts of both."""
    shapes = (queries, heads, _SIZE), (keys, 1, _SIZE), (queries, heads, _ROPE), (keys, 1, _ROPE)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _chosen(queries: int, keys: int, count: int, block_size: int = 1) -> Tensor:
    """Return different blocks of keys for each query, always including the first, padded with -1."""
    blocks = -(-keys // block_size)
    found = torch.full((queries, 1, count), -1, dtype=torch.int32)
    for row in found[:, 0]:
        others = torch.randperm(blocks - 1)[: count - 1] + 1
        row[: len(others) + 1] = torch.cat([torch.zeros(1), others])
    return found


def _scores(sequence: list[Tensor], chosen: Tensor, causal: bool, block_size: int) -> Tensor:
    """Return the scores of each query, head and key of a sequence; -inf for keys that are not chosen."""
    query, key = (torch.cat([sequence[i], sequence[i + 2]], -1) for i in (0, 1))
    keys = len(key)
    kept = (chosen == torch.arange(keys)[:, None] // block_size).any(-1)
    if causal:
        kept &= torch.arange(keys) <= torch.arange(len(query))[:, None] + keys - len(query)
    return (torch.einsum("snd,td->snt", query, key[:, 0]) * _SCALE).masked_fill(~kept[:, None], -torch.inf)


def _attention(
    sequence: list[Tensor], chosen: Tensor, *, causal: bool = True, block_size: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of one sequence, and the maximum and sum of its softmax."""
    scores = _scores(sequence, chosen, causal, block_size)
    largest = scores.amax(-1, keepdim=True)
    total = (scores - largest).exp().sum(-1)
    return scores.softmax(-1) @ sequence[1][:, 0], largest[..., 0], total


def _wide(sequence: list[Tensor]) -> list[Tensor]:
    return [each.double() for each in sequence]


def _call(inputs: list[Tensor], chosen: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    query, key, query_rope, key_rope = (each.npu() for each in inputs)
    given = {"query_rope": query_rope, "key_rope": key_rope, "attention_mode": 2, **options}
    return torch_npu.npu_sparse_flash_attention(query, key, key, chosen.npu(), _SCALE, **given)


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0).int().npu()


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize(("count", "block_size"), [(5, 1), (64, 1), (2, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sequences_of_the_same_length(dtype, count, block_size, mode):
    sequences = [_inputs(3, 21, dtype=dtype) for _ in range(2)]
    chosen = torch.stack([_chosen(3, 21, count, block_size) for _ in sequences])
    inputs = [torch.stack(each) for each in zip(*sequences, strict=True)]
    options = {"sparse_block_size": block_size, "sparse_mode": mode, "return_softmax_lse": True}
    results = _call(inputs, chosen, **options)
    assert results[1].shape == results[2].shape == (2, 1, 3, 4)
    for number, sequence in enumerate(sequences):
        expected = _attention(_wide(sequence), chosen[number], causal=mode == 3, block_size=block_size)
        assert_near(results[0][number], expected[0])
        for actual, wanted in zip(results[1:], expected[1:], strict=True):
            assert_near(actual[number, 0], wanted)


@pytest.mark.parametrize("in_blocks", [False, True], ids=["TND", "PA_BSND"])
def test_sequences_one_after_the_other(in_blocks):
    queries, keys = [1, 3, 2], [20, 5, 33]
    sequences = [_inputs(q, k) for q, k in zip(queries, keys, strict=True)]
    chosen = torch.cat([_chosen(q, k, 7) for q, k in zip(queries, keys, strict=True)])
    inputs = [torch.cat(each) for each in zip(*sequences, strict=True)]
    options = {"layout_query": "TND", "layout_kv": "TND", "actual_seq_lengths_kv": _ends(keys)}
    if in_blocks:
        # Memory outside the sequences may hold anything.
        table = torch.tensor([[3, 1, 0], [4, 0, 0], [5, 2, 6]], dtype=torch.int32)
        for at, size in ((1, _SIZE), (3, _ROPE)):
            inputs[at] = torch.full((7, 16, 1, size), torch.nan, dtype=torch.bfloat16)
            for blocks, sequence in zip(table.long(), sequences, strict=True):
                for block, part in zip(blocks, sequence[at].split(16), strict=False):
                    inputs[at][block, : len(part)] = part
        lengths = torch.tensor(keys).int().npu()
        options |= {"layout_kv": "PA_BSND", "block_table": table.npu(), "actual_seq_lengths_kv": lengths}
    result, _, _ = _call(inputs, chosen, actual_seq_lengths_query=_ends(queries), **options)
    parts = zip(sequences, chosen.split(queries), strict=True)
    assert_near(result, torch.cat([_attention(_wide(each), own)[0] for each, own in parts]))


def test_a_query_without_keys_has_the_result_0():
    inputs = [each[None] for each in _inputs(3, 2)]
    chosen = torch.tensor([[0, 1], [1, -1], [-1, 0]], dtype=torch.int32).view(1, 3, 1, 2)
    result, largest, total = _call(inputs, chosen, return_softmax_lse=True)
    # The first query's keys are all later ones, and so is the second's only key; -1 ends those of the third.
    for each in (result, largest, total):
        assert not each.any()
    chosen[0, 2, 0] = torch.tensor([1, 0])
    assert _call(inputs, chosen)[0][0].flatten(1).any(1).tolist() == [False, False, True]


@pytest.mark.parametrize("packed", [False, True], ids=["BSND", "TND"])
@pytest.mark.parametrize(("mode", "block_size"), [(0, 1), (3, 1), (3, 8)])
def test_gradients_are_those_of_float64(mode, block_size, packed):
    queries, keys = ([2, 3], [30, 17]) if packed else ([3, 3], [20, 20])
    sequences = [_inputs(q, k) for q, k in zip(queries, keys, strict=True)]
    of_sequences = [_chosen(q, k, 1024, block_size) for q, k in zip(queries, keys, strict=True)]
    for each in of_sequences:
        each[..., 6 // block_size + 1 :] = -1
    join = torch.cat if packed else torch.stack
    inputs = [join(each) for each in zip(*sequences, strict=True)]
    chosen = join(of_sequences).npu()
    layout = "TND" if packed else "BSND"
    ends = [_ends(queries), _ends(keys)] if packed else [None, None]
    lengths = {"actual_seq_lengths_query": ends[0], "actual_seq_lengths_kv": ends[1]}
    options = {"layout_query": layout, "layout_kv": layout, "sparse_block_size": block_size, "sparse_mode": mode}
    results = _call(inputs, chosen, return_softmax_lse=True, **options, **lengths)
    query, key, query_rope, key_rope = (each.npu() for each in inputs)
    dy = torch.randn(results[0].shape).bfloat16()
    grads = torch_npu.npu_sparse_flash_attention_grad(
        *(query, key, key, chosen, dy.npu(), *results, _SCALE, block_size, query_rope, key_rope, *ends),
        layout=layout,
        sparse_mode=mode,
    )
    parts = dy.double().split(queries) if packed else dy.double().unbind()
    references = [
        _gradients(sequence, own, own_dy, mode == 3, block_size)
        for sequence, own, own_dy in zip(sequences, of_sequences, parts, strict=True)
    ]
    for actual, expected in zip(grads, zip(*references, strict=True), strict=True):
        assert_near(actual, join(list(expected)), units=4)


def _gradients(sequence: list[Tensor], chosen: Tensor, dy: Tensor, causal: bool, block_size: int) -> list[Tensor]:
    """Return the gradients of query, key and value, as separate arguments, and of the rotated parts."""
    leaves = [each.requires_grad_() for each in _wide(sequence)]
    value = leaves[1].detach().clone().requires_grad_()
    result = _scores(leaves, chosen, causal, block_size).softmax(-1) @ value[:, 0]
    result.backward(dy)
    query, key, *ropes = (each.grad for each in leaves)
    return [query, key, value.grad, *ropes]


_REFUSED = [
    ({"attention_mode": 0}, "attentionMode is 0; CANN takes 2"),
    ({"sparse_mode": 1}, "sparseMode is 1; CANN takes 0 or 3"),
    ({"pre_tokens": 5}, "preTokens is 5 and nextTokens"),
    ({"sparse_block_size": 3}, "sparseBlockSize is 3; CANN takes powers of 2 up to 128 on this chip"),
    ({"query_rope": None}, "queryRope and keyRope must be given"),
    ({"layout_kv": "TND"}, "layoutKey is TND; CANN takes PA_BSND or that of the queries, BSND"),
]


@pytest.mark.parametrize(("options", "sentence"), _REFUSED)
def test_other_options_are_refused(options, sentence):
    inputs, chosen = [each[None] for each in _inputs(2, 9)], _chosen(2, 9, 3)[None]
    with pytest.raises(RuntimeError, match=sentence):
        _call(inputs, chosen, **options)
    _call(inputs, chosen)


def test_heads_are_a_power_of_2():
    with pytest.raises(RuntimeError, match="query has 3 heads; CANN takes powers of 2 on this chip"):
        _call([each[None] for each in _inputs(2, 9, heads=3)], _chosen(2, 9, 3)[None])


def test_values_are_the_keys():
    inputs, chosen = [each[None] for each in _inputs(2, 9)], _chosen(2, 9, 3)[None]
    query, key, query_rope, key_rope = (each.npu() for each in inputs)
    options = {"query_rope": query_rope, "key_rope": key_rope, "attention_mode": 2}
    torch_npu.npu_sparse_flash_attention(query, key, key + 1, chosen.npu(), _SCALE, **options)
    with pytest.raises(RuntimeError, match="value differs from key, which CANN does not take"):
        torch.npu.synchronize()


def test_a_block_behind_the_keys_is_a_fault():
    _call([each[None] for each in _inputs(1, 9)], torch.full((1, 1, 1, 1), 2, dtype=torch.int32), sparse_block_size=8)
    with pytest.raises(RuntimeError, match="sparseIndices has a block behind the 2 of 9 keys"):
        torch.npu.synchronize()
