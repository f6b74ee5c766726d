"""Attention merged from parts, with sinks, and masked softmax on the host NPU, against float64."""

import pytest
import torch
import torch_npu
from tests._values import backward, leaves, refused

_HEADS, _SIZE, _QUERIES, _KEYS, _BATCH = 2, 16, 5, 8, 3


def _columns(x):
    return x.float()[..., None].expand(*x.shape, 8).contiguous()


def _part(query, key, value):
    """Return the result and the softmax statistics of attention, all [batch, heads, sequence, ...]."""
    scores = query @ key.mT
    largest = scores.amax(-1)
    weights = (scores - largest[..., None]).exp()
    return weights / weights.sum(-1, True) @ value, largest, weights.sum(-1)


@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_attention_to_two_parts_of_the_keys_is_that_to_all(layout):
    batch = 1 if layout == "TND" else _BATCH
    query, key, value = (torch.randn(batch, _HEADS, length, _SIZE).double() for length in (_QUERIES, _KEYS, _KEYS))
    parts = [_part(query, key[:, :, keys], value[:, :, keys]) for keys in (slice(None, 3), slice(3, None))]
    result, *statistics = _part(query, key, value)

    def arranged(x):
        if layout == "TND":
            return x[0].transpose(0, 1).contiguous()
        return x.permute(2, 0, 1, 3).flatten(2).contiguous() if x.dim() == 4 else x

    given = []
    for out, *numbers in parts:
        given += [arranged(out).float().npu(), *(_columns(arranged(each)).npu() for each in numbers)]
    ends = {"actual_seq_qlen": torch.tensor([0, _QUERIES]).npu()} if layout == "TND" else {}
    actual = torch_npu.npu_ring_attention_update(*given, **ends, input_layout=layout, input_softmax_layout=layout)
    for mine, wanted in zip(
        actual, [arranged(result), *(_columns(arranged(each)) for each in statistics)], strict=True
    ):
        torch.testing.assert_close(mine.cpu().double(), wanted.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_takes_a_part_of_the_softmax(causal):
    inputs = [torch.randn(2, 6, _HEADS * _SIZE).half() for _ in range(3)] + [torch.randn(_HEADS)]
    on_npu, reference = leaves(*inputs)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else None
    options = {"atten_mask": mask.npu(), "sparse_mode": 1} if causal else {}
    *tensors, sink = on_npu
    result = torch_npu.npu_fusion_attention(*tensors, _HEADS, "BSH", sink=sink, scale=0.25, **options)[0]
    query, key, value = (each.unflatten(-1, (_HEADS, _SIZE)).transpose(1, 2) for each in reference[:3])
    scores = query @ key.mT * 0.25
    if causal:
        scores = scores.masked_fill(mask, float("-inf"))
    with_sink = torch.cat([scores, reference[3].view(1, -1, 1, 1).expand(2, -1, 6, 1)], -1)
    expected = (with_sink.softmax(-1)[..., :-1] @ value).transpose(1, 2).flatten(2)
    backward(result, expected)
    pairs = [(result, expected), *((each.grad, wide.grad) for each, wide in zip(on_npu, reference, strict=True))]
    for actual, wanted in pairs:
        bound = 2e-3 * wanted.abs().max().item()
        torch.testing.assert_close(actual.detach().cpu().double(), wanted.detach(), rtol=0, atol=bound)


@pytest.mark.parametrize("layout", ["", "TND"])
def test_packed_sequences_have_their_statistics_by_head_unless_asked_otherwise(layout):
    query, key = (torch.randn(9, _HEADS, _SIZE).half() for _ in range(2))
    ends = {"actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 9]}
    tensors = query.npu(), key.npu(), key.npu()
    maxima = torch_npu.npu_fusion_attention(*tensors, _HEADS, "TND", softmax_layout=layout, **ends)[1]
    by_head = [
        torch.einsum("qnd,knd->nqk", *each).amax(-1)
        for each in zip(query.double().split([4, 5]), key.double().split([4, 5]), strict=True)
    ]
    expected = torch.cat([(each.t() if layout else each).flatten() for each in by_head]).view(9, _HEADS, 1)
    torch.testing.assert_close(maxima.cpu().double(), expected.expand(9, _HEADS, 8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["", "TND"])
def test_packed_sequences_are_put_together_from_parts(layout):
    query, key, value = (torch.randn(9, _HEADS, _SIZE).half().npu() for _ in range(3))

    def attended(keys, ends):
        return torch_npu.npu_fusion_attention(
            query, key[keys], value[keys], _HEADS, "TND",
            scale=0.25, actual_seq_qlen=[4, 9], actual_seq_kvlen=ends, softmax_layout=layout,
        )[:3]  # fmt: skip

    actual = torch_npu.npu_ring_attention_update(
        *attended([0, 1, 4, 5], [2, 4]),
        *attended([2, 3, 6, 7, 8], [2, 5]),
        actual_seq_qlen=torch.tensor([0, 4, 9]).npu(),
        input_layout="TND",
        input_softmax_layout=layout,
    )
    for mine, wanted in zip(actual, attended(slice(None), [4, 9]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-3, atol=2e-3)


def test_the_layout_of_the_statistics_does_not_change_results():
    tensors = [torch.randn(9, _HEADS, _SIZE).half().npu().requires_grad_() for _ in range(3)]
    options = {"scale": 0.25, "actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 9]}
    default, packed = (
        torch_npu.npu_fusion_attention(*tensors, _HEADS, "TND", softmax_layout=layout, **options)[0]
        for layout in ("", "TND")
    )
    assert default.equal(packed)
    weight = torch.randn_like(packed)
    grads = [torch.autograd.grad(each, tensors, weight) for each in (default, packed)]
    assert all(mine.equal(other) for mine, other in zip(*grads, strict=True))


def test_statistics_have_heads():
    result, statistics = torch.zeros(3, 2, 8).npu(), torch.zeros(2, 0, 3, 8).npu()
    with pytest.raises(RuntimeError, match="is not made of 0 heads"):
        torch_npu.npu_ring_attention_update(*(result, statistics, statistics) * 2, input_layout="SBH")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3], ids=["one mask", "a mask for each head"])
@pytest.mark.parametrize("triangular", [False, True], ids=["", "triangular, whatever the mask"])
def test_a_masked_softmax_of_scaled_scores_has_a_gradient(dtype, heads, triangular):
    x, mask = torch.randn(2, 3, 32, 64).to(dtype), torch.rand(2, heads, 32, 64) < 0.3
    weight = torch.randn(x.shape).to(dtype)
    on_npu, exact = x.npu().requires_grad_(), x.double().requires_grad_()
    result = torch_npu.npu_scaled_masked_softmax(on_npu, mask.npu(), 0.25, triangular)
    mask = torch.ones(32, 64).triu(1).bool() if triangular else mask
    expected = (exact * 0.25).masked_fill(mask, -10000).softmax(-1)
    result.backward(weight.npu())
    expected.backward(weight.double())
    for actual, wanted in ((result, expected), (on_npu.grad, exact.grad)):
        bound = 2 * torch.finfo(dtype).eps * wanted.abs().max().item()
        torch.testing.assert_close(actual.detach().cpu().double(), wanted.detach(), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("shape", "of_mask", "sentence"),
    [
        ((1, 1, 32, 30), (1, 1, 32, 30), r"x has shape \[1, 1, 32, 30\] instead of"),
        ((2, 3, 32, 32), (2, 2, 32, 32), r"mask has shape \[2, 2, 32, 32\] instead of"),
    ],
    ids=["columns", "mask"],
)
def test_masked_softmaxes_that_are_not_documented_are_refused(shape, of_mask, sentence):
    mask = torch.zeros(of_mask, dtype=torch.bool).npu()
    with refused(f"ScaledMaskedSoftmax: {sentence}"):
        torch_npu.npu_scaled_masked_softmax(torch.ones(shape).npu(), mask, 1.0, False)
