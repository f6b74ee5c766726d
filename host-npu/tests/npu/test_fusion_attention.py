"""torch_npu's attention on the host NPU, against its formula in float64, forward and backward."""

import re

import pytest
import torch
import torch_npu
from tests._values import DTYPES, assert_gradients, assert_near, called, leaves
from torch import Tensor

_TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
_HEADS, _QUERIES, _KEYS, _SCALE = 4, 6, 9, 0.3
_ALL = 2**31 - 1
# Key index minus query index.
_DISTANCE = torch.arange(_KEYS) - torch.arange(_QUERIES)[:, None]
_LAST = _KEYS - _QUERIES
# By name: sparse mode, mask, pre_tockens and next_tockens; and the masked scores.
_MODES = {
    "no mask": (0, None, _ALL, _ALL, _DISTANCE > _ALL),
    "a mask": (0, _DISTANCE % 3 == 1, _ALL, _ALL, _DISTANCE % 3 == 1),
    "a mask and a band": (0, _DISTANCE % 3 == 1, 2, 3, (_DISTANCE % 3 == 1) | (_DISTANCE < -2) | (_DISTANCE > 3)),
    "a whole mask": (1, _DISTANCE > 4, 1, 1, _DISTANCE > 4),
    "causal from the first": (2, _TRIANGLE, 1, 1, _DISTANCE > 0),
    "causal from the last": (3, _TRIANGLE, 1, 1, _DISTANCE > _LAST),
    "a band from the last": (4, _TRIANGLE, 3, 1, (_DISTANCE > _LAST + 1) | (_DISTANCE < _LAST - 3)),
    "rows of nothing": (0, _DISTANCE > -3, _ALL, _ALL, _DISTANCE > -3),
}
_LAYOUTS = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


def _attention(query: Tensor, key: Tensor, value: Tensor, pse: Tensor | None, left_out: Tensor) -> Tensor:
    groups = query.size(1) // key.size(1)
    scores = query @ key.repeat_interleave(groups, 1).mT
    scores = (scores if pse is None else scores + pse) * _SCALE
    # A query that attends to nothing has the result 0.
    weights = scores.masked_fill(left_out, -torch.inf).softmax(-1).masked_fill(left_out, 0)
    return weights @ value.repeat_interleave(groups, 1)


def _inputs(heads_of_keys: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = (_HEADS, _QUERIES), (heads_of_keys, _KEYS), (heads_of_keys, _KEYS)
    return [torch.randn(2, heads, length, 16).to(dtype) for heads, length in sizes]


_TOKENS = "pre_tockens", "next_tockens"


def _check(inputs, layout, mode, pse=None, operator=torch_npu.npu_fusion_attention, tokens=_TOKENS):
    number, mask, before, after, left_out = mode
    on_npu = [_LAYOUTS[layout](each).contiguous().npu().requires_grad_() for each in inputs]
    reference = [each.double().requires_grad_() for each in inputs]
    of_pse = [] if pse is None else [pse.npu().requires_grad_()]
    options = {"pse": of_pse[0] if of_pse else None, "atten_mask": mask, "sparse_mode": number}
    options |= zip(tokens, (before, after), strict=True)
    result, maximum, total, *_ = called(operator, *on_npu, _HEADS, layout, scale=_SCALE, **options)
    wide_pse = None if pse is None else pse.double().requires_grad_()
    expected = _attention(*reference, wide_pse, left_out)
    assert_near(result, _LAYOUTS[layout](expected))
    assert maximum.shape == total.shape == (2, _HEADS, _QUERIES, 8) and maximum.dtype == torch.float32
    weight = torch.randn(expected.shape).to(result.dtype)
    result.backward(_LAYOUTS[layout](weight).contiguous().npu())
    expected.backward(weight.double())
    for actual, wanted in zip(on_npu, reference, strict=True):
        assert_near(actual.grad, _LAYOUTS[layout](wanted.grad), units=2)
    if wide_pse is not None:
        assert_near(of_pse[0].grad, wide_pse.grad, units=2)


@pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES)
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_each_layout_and_sparse_mode_is_that_of_float64(layout, mode):
    _check(_inputs(_HEADS, torch.float32), layout, mode)


@pytest.mark.parametrize("number", range(1, 7))
def test_a_sparse_mode_has_no_effect_without_a_mask(number):
    _check(_inputs(_HEADS, torch.float32), "BNSD", (number, None, 1, 1, _DISTANCE > _ALL))


@DTYPES
@pytest.mark.parametrize("heads_of_keys", [1, 2, 4])
def test_heads_of_keys_may_be_shared_in_each_dtype(heads_of_keys, dtype):
    _check(_inputs(heads_of_keys, dtype), "BSH", _MODES["causal from the last"])


@pytest.mark.parametrize("shape", [(2, _HEADS, _QUERIES, _KEYS), (1, _HEADS, 1, _KEYS)], ids=str)
def test_pse_is_added_before_the_scale_and_has_a_gradient(shape):
    _check(_inputs(_HEADS, torch.float32), "BNSD", _MODES["a mask"], torch.randn(shape))


def test_the_second_version_computes_the_same():
    _check(
        _inputs(2, torch.float32),
        "BSND",
        _MODES["a band from the last"],
        torch.randn(2, _HEADS, _QUERIES, _KEYS),
        operator=torch_npu.npu_fusion_attention_v2,
        tokens=("pre_tokens", "next_tokens"),
    )


@pytest.mark.parametrize("number", [5, 6])
def test_each_batch_may_have_a_prefix_that_all_queries_attend_to(number):
    prefix = [0, 7]
    left_out = torch.stack([(_DISTANCE > _LAST) & (torch.arange(_KEYS) >= length) for length in prefix])[:, None]
    picture = torch.cat([_TRIANGLE, (torch.arange(2048) >= 1024).expand(1024, -1)])
    mode = number, left_out if number == 5 else picture, _ALL, _ALL, left_out
    _check(_inputs(_HEADS, torch.float32), "BNSD", mode, operator=_with(prefix=prefix))


def _with(**options):
    return lambda *inputs, **others: torch_npu.npu_fusion_attention(*inputs, **others, **options)


_LENGTHS = {
    "as long": ((3, 5), (6, 6), (2, 4)),
    "without keys": ((3, 5), (4, 0), (2, 4)),
    "without queries": ((3, 5), (0, 4), (2, 4)),
    "empty ones": ((0, 0), (3, 5), (0, 0), (2, 4), (0, 0)),
    "without keys at the ends": ((2, 0), (3, 5), (2, 0)),
}


@pytest.mark.parametrize("lengths", _LENGTHS.values(), ids=_LENGTHS)
@pytest.mark.parametrize("mode", ["no mask", "causal from the first", "causal from the last", "a band from the last"])
def test_packed_sequences_attend_to_themselves_only(mode, lengths):
    number, mask, before, after, _ = _MODES[mode]
    query = torch.randn(sum(queries for queries, _ in lengths), _HEADS, 16)
    key, value = (torch.randn(sum(keys for _, keys in lengths), 2, 16) for _ in range(2))
    on_npu, reference = leaves(query, key, value)
    ends = [torch.tensor(each).cumsum(0).tolist() for each in zip(*lengths, strict=True)]
    options = {"atten_mask": mask, "sparse_mode": number, "pre_tockens": before, "next_tockens": after}
    options |= {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    attend = torch_npu.npu_fusion_attention
    result, maxima, sums, *_ = called(attend, *on_npu, _HEADS, "TND", scale=_SCALE, **options)
    numbers = [list(each) for each in zip(*lengths, strict=True)]
    parts = zip(*[each.split(numbers[min(at, 1)]) for at, each in enumerate(reference)], strict=True)
    results = []
    for part in parts:
        q, k, v = (each.transpose(0, 1)[None] for each in part)
        distance = torch.arange(k.size(2)) - torch.arange(q.size(2))[:, None]
        last = k.size(2) - q.size(2)
        left_out = {
            0: distance > _ALL,
            2: distance > 0,
            3: distance > last,
            4: (distance > last + after) | (distance < last - before),
        }[number]
        results.append(_attention(q, k, v, None, left_out)[0].transpose(0, 1))
    expected = torch.cat(results)
    assert_near(result, expected)
    # Like the statistics of a query that attends to nothing.
    without_keys = torch.cat([torch.full((queries,), keys == 0) for queries, keys in lengths]).npu()
    assert sums[without_keys].eq(0).all() and maxima[without_keys].eq(torch.finfo(torch.float32).min).all()
    assert_gradients(result, expected, on_npu, reference, units=2)


def _attention_with_sink(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
    """Return the causal attention of tensors [heads, sequence, size]."""
    scores = query @ key.repeat_interleave(2, 0).mT * _SCALE
    rows, columns = scores.shape[1:]
    scores = scores.masked_fill(_TRIANGLE[:rows, :columns].roll(columns - rows, 1).triu(columns - rows + 1), -torch.inf)
    weights = torch.cat([scores, sink.view(-1, 1, 1).expand(-1, rows, 1)], -1).softmax(-1)
    return weights[..., :-1] @ value.repeat_interleave(2, 0)


@pytest.mark.parametrize("layout", ["BNSD", "TND", "TND by token"])
def test_a_sink_takes_part_in_the_softmax_and_attends_to_nothing(layout):
    lengths = [(6, 9)] if layout == "BNSD" else [(2, 3), (4, 6)]
    inputs = [torch.randn(heads, n, 16).half() for heads, n in ((4, 6), (2, 9), (2, 9))] + [torch.randn(4)]
    ends = [torch.tensor(each).cumsum(0) for each in zip(*lengths, strict=True)]
    options = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]} if layout != "BNSD" else {}
    if layout == "TND by token":
        options["softmax_layout"] = "TND"
    of_layout = (lambda x: x[None]) if layout == "BNSD" else (lambda x: x.transpose(0, 1).contiguous())
    on_npu = [of_layout(each).npu().requires_grad_() for each in inputs[:3]] + [inputs[3].npu().requires_grad_()]
    result, *_ = torch_npu.npu_fusion_attention_v3(
        *on_npu[:3], 4, layout[:4].strip(), atten_mask=_TRIANGLE.npu(), scale=_SCALE, sparse_mode=3, sink=on_npu[3],
        **options,
    )  # fmt: skip
    exact = [each.double().requires_grad_() for each in inputs]
    parts = [each.split([length[at > 0] for length in lengths], 1) for at, each in enumerate(exact[:3])]
    expected = torch.cat([_attention_with_sink(*each, exact[3]) for each in zip(*parts, strict=True)], 1)
    assert_near(result, of_layout(expected), units=2)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (result * of_layout(weights).half().npu()).sum().backward()
    for found, wanted in zip(on_npu, exact, strict=True):
        wanted_grad = wanted.grad if wanted.dim() == 1 else of_layout(wanted.grad)
        torch.testing.assert_close(found.grad.cpu().double(), wanted_grad, rtol=2e-2, atol=2e-2)


def test_a_sink_has_a_number_for_each_head():
    x, ends = torch.randn(6, 4, 16).half().npu(), torch.tensor([6])
    with pytest.raises(RuntimeError, match=r"sink has shape \[3\] instead of one number for each of 4 heads"):
        torch_npu.npu_fusion_attention_v3(
            x, x, x, 4, "TND", sink=torch.zeros(3).npu(), actual_seq_qlen=ends, actual_seq_kvlen=ends
        )


@pytest.mark.parametrize("has_rope", [False, True])
def test_a_part_of_the_heads_may_have_tensors_of_its_own(has_rope):
    inputs = [torch.randn(9, heads, size) for heads, size in ((_HEADS, 32), (2, 32), (2, 32), (_HEADS, 16), (2, 16))]
    inputs = inputs if has_rope else inputs[:3]
    on_npu, reference = leaves(*inputs)
    ropes = {"query_rope": on_npu[3], "key_rope": on_npu[4]} if has_rope else {}
    ends = {"actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 9]}
    result = torch_npu.npu_fusion_attention_v2(*on_npu[:3], _HEADS, "TND", scale=_SCALE, **ends, **ropes)[0]
    heads = [torch.cat(pair, -1) for pair in zip(reference, reference[3:], strict=False)] or reference[:2]
    parts = zip(*[each.transpose(0, 1)[None].split([4, 5], 2) for each in (*heads, reference[2])], strict=True)
    nothing = torch.tensor(False)
    expected = torch.cat([_attention(*part, None, nothing)[0].transpose(0, 1) for part in parts])
    assert_near(result, expected)
    assert_gradients(result, expected, on_npu, reference, units=2)


def _boolean(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


_REFUSED = {
    "a padding mask": ({"padding_mask": torch.ones(6, 6)}, "padding mask"),
    "a prefix for another batch": (
        {"sparse_mode": 5, "prefix": [1, 2], "atten_mask": _boolean(1, 1, 6, 6)},
        "prefix has 2 numbers instead of one for each of 1 batches",
    ),
    "a small triangle": ({"sparse_mode": 3, "atten_mask": _boolean(6, 6)}, "2048 x 2048"),
    "heads": ({"head_num": 3}, "headNum is 3 instead of the number of its heads"),
    "a mask": ({"atten_mask": _boolean(5, 7)}, r"attenMask has shape \[5, 7\] instead of \[..., 6, 6\]"),
    "a whole mask": ({"sparse_mode": 1, "atten_mask": _boolean(1, 6)}, r"has shape \[1, 6\] instead of \[..., 6, 6\]"),
    "a mask of one dimension for batches or heads": (
        {"atten_mask": _boolean(_HEADS, 6, 6)},
        "attenMask has shape .* CANN takes 2 or 4 dimensions",
    ),
    "pse of three dimensions": ({"pse": torch.ones(_HEADS, 6, 6)}, "pse has shape .* CANN takes 4 dimensions"),
    "pse": ({"pse": torch.ones(1, 2, 6, 6)}, r"pse has shape \[1, 2, 6, 6\], .* the scores, \[1, 4, 6, 6\]"),
}


@pytest.mark.parametrize(("options", "sentence"), _REFUSED.values(), ids=_REFUSED)
def test_what_is_not_computed_is_refused_at_the_call(options, sentence):
    query = torch.randn(1, _HEADS, 6, 16).npu()
    options = {"head_num": _HEADS, "input_layout": "BNSD"} | options
    with pytest.raises(RuntimeError, match=sentence):
        called(torch_npu.npu_fusion_attention, query, query, query, **options)
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_attention_of_no_keys_is_refused(layout):
    query, keys = (_LAYOUTS[layout](torch.zeros(2, 4, length, 16)).contiguous().npu() for length in (6, 0))
    with pytest.raises(RuntimeError, match="attention of at least one key, but key has shape"):
        torch_npu.npu_fusion_attention(query, keys, keys, 4, layout)


@pytest.mark.parametrize("layout", ["BSH", "SBH"])
@pytest.mark.parametrize(
    ("widths", "sentence"),
    [
        ((62, 32, 32), "query has shape .* not made of headNum, 4, heads"),
        ((64, 33, 32), "key has shape .* not a multiple of the size of query's heads, 16"),
        ((64, 32, 33), "value has shape .* not a multiple of the number of key's heads, 2"),
    ],
)
def test_joined_heads_have_to_be_whole(layout, widths, sentence):
    inputs = [torch.zeros(3, 3, width).npu() for width in widths]
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_fusion_attention(*inputs, _HEADS, layout)


def test_heads_of_values_may_be_smaller():
    query, key, value = _inputs(2, torch.float32)
    result = torch_npu.npu_fusion_attention(
        *[each.npu() for each in (query, key, value[..., :8])], _HEADS, "BNSD", scale=_SCALE
    )[0]
    expected = _attention(query.double(), key.double(), value[..., :8].double(), None, _DISTANCE > _ALL)
    assert_near(result, expected)


# The numbers of query and key tokens that belong to no sequence.
@pytest.mark.parametrize("others", [(0, 0), (11, 7)], ids=["no other tokens", "other tokens"])
@pytest.mark.parametrize("mode", [0, 3])
def test_zeros_behind_the_ends_leave_sequences_out(mode, others):
    ends = {"actual_seq_qlen": [2, 5, 9], "actual_seq_kvlen": [3, 3, 10]}
    options = {"scale": _SCALE, "sparse_mode": mode, "atten_mask": _TRIANGLE.npu() if mode else None}
    tokens = 9, 10, 10
    inputs = [
        torch.randn(count + more, _HEADS, 16).npu().requires_grad_()
        for count, more in zip(tokens, (others[0], *[others[1]] * 2), strict=True)
    ]
    parts = [each.detach()[:count].clone().requires_grad_() for each, count in zip(inputs, tokens, strict=True)]
    expected = torch_npu.npu_fusion_attention(*parts, _HEADS, "TND", **options, **ends)[:3]
    zeros = {name: [*numbers, 0, 0] for name, numbers in ends.items()}
    actual = torch_npu.npu_fusion_attention(*inputs, _HEADS, "TND", **options, **zeros)[:3]
    for whole, part, other in zip(actual, expected, (0, torch.finfo(torch.float32).min, 0), strict=True):
        assert torch.equal(whole[:9], part) and whole[9:].eq(other).all()
    weight = torch.randn(9, _HEADS, 16).npu()
    expected[0].backward(weight)
    actual[0].backward(torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, others[0]), value=3.0))
    for whole, part in zip(inputs, parts, strict=True):
        assert torch.equal(whole.grad[: len(part)], part.grad) and whole.grad[len(part) :].eq(0).all()


def test_the_compression_of_alibi_is_not_simulated():
    query, key, pse = (torch.zeros(shape).npu() for shape in ((1, 2, 1100, 16), (1, 2, 1100, 16), (1, 2, 1024, 1100)))
    with pytest.raises(RuntimeError, match="the host NPU does not simulate the compression of ALiBi"):
        torch_npu.npu_fusion_attention(
            query, key, key, 2, "BNSD", pse=pse, sparse_mode=2, atten_mask=_TRIANGLE.npu(), next_tockens=0
        )


_ENDS = "CANN takes where each sequence ends, so that the numbers do not decrease and the last one is"


@pytest.mark.parametrize(
    ("tokens", "ends", "sentence"),
    [
        ((6, 9, 10), ([2, 6], [4, 9]), "value has shape [10, 2, 16] instead of [T2, N2, V], where N2 is 2 and T2 is 9"),
        ((6, 9, 9), ([2, 7], [4, 9]), f"actualSeqQLen is [2, 7] for query of shape [6, 4, 16]; {_ENDS} 6"),
        ((6, 9, 9), ([2, 4], [4, 5]), f"actualSeqQLen is [2, 4] for query of shape [6, 4, 16]; {_ENDS} 6"),
        ((6, 9, 9), ([2, 6], [10, 9]), f"actualSeqKvLen is [10, 9] for key of shape [9, 2, 16]; {_ENDS} 9"),
        ((6, 9, 9), ([2, 7, 0], [4, 5, 0]), f"actualSeqQLen is [2, 7, 0] for query of shape [6, 4, 16]; {_ENDS} 6"),
        ((6, 9, 9), ([2, 4, 0], [4, 5, 9]), "actualSeqQLen has 2 numbers and actualSeqKvLen 3 without zeros"),
    ],
    ids=["values", "past the end", "lengths", "decreasing", "left out past the end", "left out in one"],
)
def test_sequences_have_to_fit_the_tokens(tokens, ends, sentence):
    inputs = [torch.zeros(count, heads, 16).npu() for count, heads in zip(tokens, (_HEADS, 2, 2), strict=True)]
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        torch_npu.npu_fusion_attention(*inputs, _HEADS, "TND", actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1])


@pytest.mark.parametrize("has_pse", [False, True], ids=["", "pse of all batches"])
def test_several_threads_share_batches_and_heads(has_pse):
    given = [torch.randn(3, 8, 160, 16) for _ in range(3)] + [torch.randn(1, 8, 160, 160)] * has_pse
    on_npu = [each.npu().requires_grad_() for each in given]
    weight = torch.randn(given[0].shape)
    expected = [each.double().requires_grad_() for each in given]
    query, key, value, *pse = expected
    scores = sum(pse, query @ key.transpose(-1, -2)) * _SCALE
    (scores.softmax(-1) @ value).backward(weight.double())
    torch.npu.synchronize()
    torch.set_num_threads(2)
    try:
        with torch.npu.stream(torch.npu.Stream()):  # its thread starts now
            result = torch_npu.npu_fusion_attention(*on_npu[:3], 8, "BNSD", pse=[*on_npu[3:], None][0], scale=_SCALE)[0]
            # Repeated, because threads that add to the same gradient lose a sum only occasionally.
            found = [torch.autograd.grad(result, on_npu, weight.npu(), retain_graph=True) for _ in range(20)]
        torch.npu.synchronize()
    finally:
        torch.set_num_threads(1)
    for gradients in found:
        for actual, wanted in zip(gradients, expected, strict=True):
            assert_near(actual, wanted.grad, units=8)
