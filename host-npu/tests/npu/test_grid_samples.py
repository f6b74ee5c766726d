"""Samples of 16-bit grids are computed in float32 and rounded once."""

import pytest
import torch
from torch.nn.functional import grid_sample


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("sizes", [(224, 224), (3, 20, 20)], ids=str)
def test_samples_and_gradients_are_those_of_float32_rounded_once(sizes, mode, dtype):
    image = torch.rand(1, 2, *sizes).to(dtype)
    grid = (torch.rand(1, *sizes, len(sizes)) * 2 - 1).to(dtype)
    results = []
    for to in (lambda x: x.npu(), lambda x: x.float()):
        inputs = [to(each).requires_grad_() for each in (image, grid)]
        samples = grid_sample(*inputs, mode=mode, align_corners=True)
        samples.backward(torch.ones_like(samples))
        results.append([samples, *(each.grad for each in inputs)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.cpu(), expected.to(dtype))
