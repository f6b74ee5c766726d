"""Causal convolutions and compressed blocks on the host NPU, with gradients, against float64."""

import pytest
import torch
import torch_npu
from tests._values import backward, leaves


def _assert_as_float64(on_npu, reference, inputs, limit=2e-5):
    """Assert that results and gradients are those of float64."""
    npus, wides = leaves(*inputs)
    result, expected = on_npu(*npus), reference(*wides)
    backward(result, expected)
    pairs = [(result, expected), *((mine.grad, wide.grad) for mine, wide in zip(npus, wides, strict=True))]
    for actual, wanted in pairs:
        bound = limit * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(actual.detach().cpu().double(), wanted.detach(), rtol=0, atol=bound)


@pytest.mark.parametrize("masked", [False, True])
def test_a_convolution_sees_earlier_tokens_only(masked):
    mask = torch.rand(2, 7) < 0.7

    def reference(x, weight):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 0))
        result = sum(padded[shift : shift + 7] * weight[shift] for shift in range(3))
        return result * mask.t()[..., None] if masked else result

    _assert_as_float64(
        lambda x, weight: torch_npu.npu_masked_causal_conv1d(x, weight, mask=mask.npu() if masked else None),
        reference,
        [torch.randn(7, 2, 16), torch.randn(3, 16)],
    )


@pytest.mark.parametrize(("name", "sizes"), [("dy", (1, 2, 16)), ("weight", (3, 8)), ("mask", (2, 6))])
def test_the_gradient_of_a_convolution_has_the_shape_of_its_input(name, sizes):
    shapes = {"dy": (7, 2, 16), "x": (7, 2, 16), "weight": (3, 16), "mask": (2, 7), name: sizes}
    *tensors, mask = (torch.ones(shape).npu() for shape in shapes.values())
    with pytest.raises(RuntimeError, match=rf"{name} has shape \[{', '.join(map(str, sizes))}\]"):
        torch.ops.npu.npu_masked_causal_conv1d_backward(*tensors, mask=mask.bool())


def test_a_block_of_tokens_becomes_one():
    ends, size, stride = [40, 50, 96], 32, 16

    def reference(x, weight):
        begins = [
            begin for first, last in [(0, 40), (40, 50), (50, 96)] for begin in range(first, last - size + 1, stride)
        ]
        return torch.stack([(x[begin : begin + size] * weight[..., None]).sum(0) for begin in begins])

    _assert_as_float64(
        lambda x, weight: torch_npu.npu_nsa_compress(x, weight, size, stride, actual_seq_len=ends),
        reference,
        [torch.randn(96, 2, 16).half(), torch.randn(size, 2).half()],
        limit=2**-11,
    )
