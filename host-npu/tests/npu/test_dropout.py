"""torch_npu's dropout on the host NPU: statistics of the masks, and results against float64 with the same mask."""

import pytest
import torch
import torch_npu
from tests._values import backward, leaves
from torch import Tensor

_HEADS = 2
_LENGTHS = ((24, 32), (40, 16))


def _bits(mask: Tensor, count: int) -> Tensor:
    bytes_of_mask = mask.cpu().to(torch.int32)
    return (bytes_of_mask[:, None] >> torch.arange(8) & 1).flatten()[:count].bool()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_mask_drops_as_many_as_asked(p):
    mask = torch.ops.npu._npu_dropout_gen_mask(torch.ones(1).npu(), (200_000,), p, 5, 7)
    # Four standard deviations.
    assert _bits(mask, 200_000).double().mean().item() == pytest.approx(1 - p, abs=4 * (p * (1 - p) / 200_000) ** 0.5)


def test_a_mask_is_that_of_its_seed_and_offset():
    x = torch.ones(1).npu()
    masks = [torch.ops.npu._npu_dropout_gen_mask(x, (1024,), 0.5, *at) for at in ((1, 2), (1, 2), (2, 2), (1, 3))]
    first, *others = (_bits(mask, 1024) for mask in masks)
    assert [first.equal(other) for other in others] == [True, False, False]
    # Two independent masks agree in half of their bits.
    assert all(0.4 < (first == other).double().mean() < 0.6 for other in others[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_forward_and_backward_of_dropout_use_one_mask(dtype):
    x = torch.randn(33, 65).to(dtype)
    on_npu = x.npu().requires_grad_()
    result, mask = torch_npu._npu_dropout(on_npu, 0.25)
    kept = _bits(mask, x.numel()).view(x.shape).double() / 0.75
    assert torch.allclose(result.detach().cpu().double(), x.double() * kept, rtol=torch.finfo(dtype).eps)
    weight = torch.randn(33, 65).to(dtype)
    result.backward(weight.npu())
    assert on_npu.grad is not None
    assert torch.allclose(on_npu.grad.cpu().double(), weight.double() * kept, rtol=torch.finfo(dtype).eps)


def test_the_derivative_of_pytorch_takes_a_mask_of_bits_or_of_its_own():
    # The mask has 16 bytes, which would broadcast.
    x, weight = torch.ones(8, 16, device="npu"), torch.randn(8, 16)
    mask = torch_npu._npu_dropout(x, 0.25)[1]
    derived = torch.ops.aten.native_dropout_backward
    kept = _bits(mask, 128).view(8, 16).double()
    assert torch.allclose(derived(weight.npu(), mask, 1 / 0.75).cpu().double(), weight.double() * kept / 0.75)
    gradient = weight.npu()
    # The result must not alias the gradient, because a program may modify it.
    assert derived(gradient, mask, 1.0).mul_(2).cpu().equal(weight * 2) and gradient.cpu().equal(weight)
    assert not derived(weight.npu(), mask, 0.0).any()
    result, own = torch.native_dropout(x, 0.5, True)
    assert derived(x, own, 2.0).equal(result)


def test_a_seed_repeats_dropout():
    x = torch.ones(1000, device="npu")
    torch.npu.manual_seed(3)
    first = [torch_npu._npu_dropout(x, 0.5)[0] for _ in range(2)]
    torch.npu.manual_seed(3)
    second = [torch_npu._npu_dropout(x, 0.5)[0] for _ in range(2)]
    assert first[0].equal(second[0]) and first[1].equal(second[1]) and not first[0].equal(first[1])


def test_attention_drops_weights_forward_and_backward_alike():
    query, key = torch.randn(2, _HEADS, 24, 32), torch.randn(2, _HEADS, 32, 32)
    # With an identity as value, the result is the weights after dropout.
    value = torch.eye(32)[None, None].repeat(2, _HEADS, 1, 1)
    _check_attention([query, key, value], "BNSD", [(query, key)])


def test_attention_of_packed_sequences_drops_weights_forward_and_backward_alike():
    queries, keys = zip(*_LENGTHS, strict=True)
    query, key = torch.randn(sum(queries), _HEADS, 32), torch.randn(sum(keys), _HEADS, 32)
    value = torch.cat([torch.eye(size, 32)[:, None].repeat(1, _HEADS, 1) for size in keys])
    ends = {
        "actual_seq_qlen": torch.tensor(queries).cumsum(0).tolist(),
        "actual_seq_kvlen": torch.tensor(keys).cumsum(0).tolist(),
    }
    by_head = [
        (q.transpose(0, 1)[None], k.transpose(0, 1)[None])
        for q, k in zip(query.split(queries), key.split(keys), strict=True)
    ]
    _check_attention([query, key, value], "TND", by_head, **ends)


def _check_attention(inputs: list[Tensor], layout: str, sequences: list[tuple[Tensor, Tensor]], **ends) -> None:
    """Take the mask from a first result with an identity as value, and compare other values and gradients."""
    keep_prob = 0.75

    def attention(*on_npu: Tensor) -> Tensor:
        torch.npu.manual_seed(11)
        return torch_npu.npu_fusion_attention(
            *on_npu, _HEADS, layout, scale=0.25, keep_prob=keep_prob, sparse_mode=0, **ends
        )[0]

    weights = attention(*[each.npu() for each in inputs]).cpu()
    parts = [weights] if layout == "BNSD" else [each.transpose(0, 1)[None] for each in weights.split([24, 40])]
    kept = [part[..., : k.size(-2)] != 0 for part, (_, k) in zip(parts, sequences, strict=True)]
    for part in kept:
        assert part.double().mean().item() == pytest.approx(keep_prob, abs=4 * (0.1875 / part.numel()) ** 0.5)

    inputs[2] = torch.randn(inputs[2].shape)
    on_npu, reference = leaves(*inputs)
    result, expected = attention(*on_npu), _dropped(reference, layout, kept, keep_prob)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())
    backward(result, expected)
    for actual, wanted in zip(on_npu, reference, strict=True):
        assert actual.grad is not None and wanted.grad is not None
        limit = 4e-6 * wanted.grad.abs().max().item()
        torch.testing.assert_close(actual.grad.cpu().double(), wanted.grad, rtol=0, atol=limit)


def _dropped(inputs: list[Tensor], layout: str, kept: list[Tensor], keep_prob: float) -> Tensor:
    if layout == "BNSD":
        return _weighted(*inputs, kept[0], keep_prob)
    queries, keys = zip(*_LENGTHS, strict=True)
    parts = zip(inputs[0].split(queries), inputs[1].split(keys), inputs[2].split(keys), kept, strict=True)
    return torch.cat(
        [
            _weighted(*[each.transpose(0, 1)[None] for each in (q, k, v)], mask, keep_prob)[0].transpose(0, 1)
            for q, k, v, mask in parts
        ]
    )


def _weighted(query: Tensor, key: Tensor, value: Tensor, kept: Tensor, keep_prob: float) -> Tensor:
    return ((query @ key.mT * 0.25).softmax(-1) * kept / keep_prob) @ value
