"""ROIAlign on the host NPU, against samples computed one by one in float64."""

import math

import pytest
import torch
import torch_npu
from tests._values import refused
from torch import Tensor

# The second is smaller than an element, the third extends beyond the image, and the last is empty.
_REGIONS = [[0, 1, 2, 18, 13], [1, 4, 4, 5, 5], [1, -9, -6, 40, 60], [0, 30, 3, 39, 17], [1, 8, 8, 8, 8]]


def _sample(image: Tensor, y: float, x: float) -> Tensor:
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(image.size(0), dtype=torch.float64)
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    above = image[:, top, left] * (left + 1 - x) + image[:, top, right] * (x - left)
    below = image[:, bottom, left] * (left + 1 - x) + image[:, bottom, right] * (x - left)
    return above * (top + 1 - y) + below * (y - top)


def _part(image: Tensor, region: list[float], place: tuple[int, int], samples: int, mode: int) -> Tensor:
    """Return the mean of one of 3 x 2 bins."""
    points = []
    for begin, end, at, parts in ((region[2], region[4], place[0], 3), (region[1], region[3], place[1], 2)):
        size = (end - begin) * 0.25 if mode >= 2 else max((end - begin) * 0.25, 1)
        count = samples or math.ceil(size / parts)
        first = begin * 0.25 - (0.5 if mode >= 2 else 0)
        points.append([first + (at + (number + 0.5) / count) * size / parts for number in range(count)])
    if not points[0] or not points[1]:
        return torch.zeros(image.size(0), dtype=torch.float64)
    return torch.stack([_sample(image, y, x) for y in points[0] for x in points[1]]).mean(0)


@pytest.mark.parametrize("mode", [0, 2, 3])
@pytest.mark.parametrize("samples", [2, 0], ids=["two", "all"])
def test_a_part_of_a_region_is_the_mean_of_its_samples(samples, mode):
    x, regions = torch.randn(2, 3, 7, 9), torch.tensor(_REGIONS, dtype=torch.float32)
    exact = x.double().requires_grad_()
    result = torch_npu.npu_roi_align(x.npu(), regions.npu(), 0.25, 3, 2, samples, mode)
    parts = [
        _part(exact[int(region[0])], region, (row, column), samples, mode)
        for region in _REGIONS
        for row in range(3)
        for column in range(2)
    ]
    expected = torch.stack(parts).view(-1, 3, 2, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    gradient = torch_npu.npu_roi_alignbk(
        weights.float().npu(), regions.npu(), [*x.shape], 2, 3, 0.25, samples, roi_end_mode=mode
    )
    torch.testing.assert_close(gradient.cpu().double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_the_example_of_torch_npu():
    x = torch.arange(1.0, 37).view(1, 1, 6, 6).npu()
    result = torch_npu.npu_roi_align(x, torch.tensor([[0, -2.0, -2.0, 22.0, 22.0]]).npu(), 0.25, 3, 3, 2, 0)
    assert result.tolist() == [[[[4.5, 6.5, 8.5], [16.5, 18.5, 20.5], [28.5, 30.5, 32.5]]]]


@pytest.mark.parametrize(
    ("shape", "mode", "sentence"),
    [
        ((2, 5), 1, "roiEndMode is 1; the host NPU takes 0, 2 and 3"),
        ((2, 4), 0, r"rois has shape \[2, 4\] instead of \[N, 5\]"),
    ],
)
def test_other_modes_and_regions_are_refused_at_the_call(shape, mode, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        torch_npu.npu_roi_align(torch.randn(1, 2, 6, 6).npu(), torch.zeros(shape).npu(), 0.25, 3, 3, 2, mode)


def test_a_region_is_one_of_an_image():
    with refused("rois has image 1 of 1"):
        torch_npu.npu_roi_align(torch.randn(1, 2, 6, 6).npu(), torch.ones(1, 5).npu(), 0.25, 3, 3, 2, 0)
