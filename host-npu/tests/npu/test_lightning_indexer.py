"""The lightning indexer on the host NPU. Scores of small integers are exact, and so are ties."""

import pytest
import torch
import torch_npu
from torch import Tensor

_HEADS, _SIZE, _BLOCK = 4, 128, 16


def _whole(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).half()


def _top(query: Tensor, key: Tensor, weights: Tensor, count: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the indices and scores of one sequence's selected keys; -1 and -inf for missing keys."""
    scores = torch.einsum("snd,td->snt", query.double(), key[:, 0].double()).relu() * weights.double().unsqueeze(-1)
    scores = scores.sum(1)
    if causal:
        behind = torch.arange(len(key)) > torch.arange(len(query))[:, None] + len(key) - len(query)
        scores = scores.masked_fill(behind, -torch.inf)
    sorted_scores, order = scores.sort(dim=-1, descending=True, stable=True)
    numbers, values = torch.full((len(query), count), -1), torch.full((len(query), count), -torch.inf).double()
    kept = min(count, len(key))
    numbers[:, :kept] = order.masked_fill(sorted_scores.isneginf(), -1)[:, :kept]
    values[:, :kept] = sorted_scores[:, :kept]
    return numbers, values


def _inputs(queries: list[int], keys: list[int]) -> list[list[Tensor]]:
    """Return the queries, keys and weights of each sequence."""
    return [
        [_whole(q, _HEADS, _SIZE), _whole(k, 1, _SIZE), torch.randint(1, 5, (q, _HEADS)).half() / 4]
        for q, k in zip(queries, keys, strict=True)
    ]


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0).int().npu()


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("count", [1, 5, 2048])
def test_sequences_of_the_same_length(mode, count):
    sequences = _inputs([3, 3], [9, 9])
    query, key, weights = (torch.stack(each).npu() for each in zip(*sequences, strict=True))
    found, scores = torch_npu.npu_lightning_indexer(
        query, key, weights, sparse_count=count, sparse_mode=mode, return_value=True
    )
    assert found.dtype == torch.int32 and found.shape == scores.shape == (2, 3, 1, count)
    for number, sequence in enumerate(sequences):
        wanted, values = _top(*sequence, count, mode == 3)
        assert torch.equal(found[number, :, 0].cpu(), wanted.int())
        assert torch.equal(scores[number, :, 0].cpu(), values.half())


def test_tokens_past_the_lengths_have_no_keys_and_are_none():
    sequences = _inputs([4, 4], [9, 9])
    lengths = [[2, 4], [7, 9]]
    query, key, weights = (torch.stack(each).npu() for each in zip(*sequences, strict=True))
    names = "actual_seq_lengths_query", "actual_seq_lengths_key"
    of_sequences = {name: torch.tensor(each).int().npu() for name, each in zip(names, lengths, strict=True)}
    found, _ = torch_npu.npu_lightning_indexer(query, key, weights, sparse_count=6, **of_sequences)
    for number, (query, key, weights) in enumerate(sequences):
        queries, keys = lengths[0][number], lengths[1][number]
        wanted, _ = _top(query[:queries], key[:keys], weights[:queries], 6, True)
        assert torch.equal(found[number, :queries, 0].cpu(), wanted.int())
        assert found[number, queries:].eq(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_sequences_one_after_the_other(in_blocks, dtype):
    queries, keys = [1, 3, 2], [20, 5, 33]
    sequences = _inputs(queries, keys)
    query, key, weights = (torch.cat(each).to(dtype).npu() for each in zip(*sequences, strict=True))
    options = {"layout_query": "TND", "layout_key": "TND", "actual_seq_lengths_key": _ends(keys)}
    if in_blocks:
        table = torch.tensor([[3, 1, 0], [0, 0, 0], [5, 2, 6]], dtype=torch.int32)
        key = torch.zeros(7, _BLOCK, 1, _SIZE, dtype=dtype)
        table[1, 0] = 4
        for blocks, (_, tokens, _) in zip(table.long(), sequences, strict=True):
            for block, part in zip(blocks, tokens.split(_BLOCK), strict=False):
                key[block, : len(part)] = part
        key = key.npu()
        lengths = torch.tensor(keys).int().npu()
        options |= {"layout_key": "PA_BSND", "block_table": table.npu(), "actual_seq_lengths_key": lengths}
    found, _ = torch_npu.npu_lightning_indexer(
        query, key, weights, actual_seq_lengths_query=_ends(queries), sparse_count=8, **options
    )
    wanted = torch.cat([_top(*sequence, 8, True)[0] for sequence in sequences])
    assert torch.equal(found[:, 0].cpu(), wanted.int())


def _scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return (torch.einsum("snd,td->snt", query, key[:, 0]).relu() * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("packed", [False, True], ids=["BSND", "TND"])
def test_gradients_are_those_of_the_chosen_scores(packed):
    queries, keys = ([2, 3], [30, 17]) if packed else ([3, 3], [20, 20])
    sequences = [
        [torch.randn(q, _HEADS, _SIZE).half(), torch.randn(k, 1, _SIZE).half(), torch.randn(q, _HEADS).half()]
        for q, k in zip(queries, keys, strict=True)
    ]
    joined = [(torch.cat if packed else torch.stack)(each) for each in zip(*sequences, strict=True)]
    on_npu = [each.npu().requires_grad_() for each in joined]
    options = {"layout_query": "TND", "layout_key": "TND"} if packed else {}
    if packed:
        options |= {"actual_seq_lengths_query": _ends(queries), "actual_seq_lengths_key": _ends(keys)}
    found, values = torch_npu.npu_lightning_indexer(*on_npu, return_value=True, **options)
    grad = torch.randn(values.shape).half()
    values.backward(grad.npu())

    references = [[x.double().requires_grad_() for x in sequence] for sequence in sequences]
    numbers, grads = found.cpu().flatten(-2), grad.double().flatten(-2)
    split = (lambda x: x.split(queries)) if packed else (lambda x: x.unbind())
    for reference, at, dy in zip(references, split(numbers), split(grads), strict=True):
        chosen = _scores(*reference).gather(1, at.clamp(min=0).long())
        chosen.backward(dy.masked_fill(at < 0, 0))
    for each, parts in zip(on_npu, zip(*references, strict=True), strict=True):
        expected = (torch.cat if packed else torch.stack)([part.grad for part in parts])
        limit = 2**-10 * expected.abs().max().item()
        torch.testing.assert_close(each.grad.cpu().double(), expected, rtol=0, atol=limit)


def _call(*, heads: int = _HEADS, size: int = _SIZE, key_heads: int = 1, **options: object) -> None:
    query, key = torch.zeros(1, 3, heads, size).half().npu(), torch.zeros(1, 9, key_heads, size).half().npu()
    torch_npu.npu_lightning_indexer(query, key, torch.zeros(1, 3, heads).half().npu(), **options)


_REFUSED = [
    ({"sparse_count": 2049}, "sparseCount is 2049; CANN takes 1 to 2048, and the multiples of 1024 up to 8192"),
    ({"sparse_mode": 1}, "sparseMode is 1; CANN takes 0 or 3"),
    ({"pre_tokens": 5}, "preTokens is 5 and nextTokens"),
    ({"heads": 65}, "query has shape"),
    ({"size": 64}, "query has shape"),
    ({"key_heads": 2}, "sparseIndicesOut has shape"),
    ({"layout_key": "TND"}, "layoutKey is TND; CANN takes PA_BSND or that of the queries, BSND"),
    ({"layout_key": "PA_BSND"}, "actualSeqLengthsKey must be given in the layout PA_BSND"),
    # From CANN's tiling, lightning_indexer_tiling.cpp.
    ({"layout_key": "PA_BSND", "return_value": True}, "returnValues is not for the layout PA_BSND"),
]


@pytest.mark.parametrize(("options", "sentence"), _REFUSED)
def test_other_arguments_are_refused(options, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        _call(**options)
    _call(sparse_count=4)
