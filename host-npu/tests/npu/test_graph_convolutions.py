"""The graph operators (aclop) of convolutions give the results of formulas in float64, in both compile modes."""

import pytest
import torch
import torch_npu
from tests._values import refused
from torch import Tensor
from torch.nn import functional
from torch_npu.contrib.module import DCNv2

pytestmark = [
    pytest.mark.usefixtures("jit_compile"),
    pytest.mark.parametrize("jit_compile", [False, True], indirect=True),
]


def values_and_gradients(call, *given: Tensor) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in given]
    value = call(*inputs)
    (value * torch.arange(value.numel(), device=value.device).view_as(value) / value.numel()).sum().backward()
    gradients = [each.grad for each in inputs]
    return [each.detach().cpu().float() for each in (value, *gradients) if each is not None]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_conv2d_and_its_gradients(groups, with_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 7, 8), torch.randn(6, 4 // groups, 3, 2)
    bias, options = torch.randn(6) if with_bias else torch.zeros(6), ([2, 1], [1, 0], [1, 2], groups)
    found = torch_npu.npu_conv2d(x.npu(), weight.npu(), bias.npu() if with_bias else None, *options)
    dy = torch.arange(found.numel()).view_as(found) / found.numel()
    gradients = torch.ops.npu.npu_conv2d_backward(x.npu(), dy.npu(), weight.npu(), *options, [True] * 3)
    expected = values_and_gradients(
        lambda *inputs: functional.conv2d(*inputs, *options), *(each.double() for each in (x, weight, bias))
    )
    torch.testing.assert_close([each.cpu() for each in (found, *gradients)], expected, rtol=1e-4, atol=1e-4)


def deformable_conv2d(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Return the convolution of [N, C, H, W] with stride 2 by rows, padding of 1 and 2, and dilation 2 by columns."""
    rows, columns = weight.shape[2:]
    count, _, height, width = offsets.shape
    parts = offsets.view(count, 3, groups, rows, columns, height, width)
    x_at = parts[:, 0] + torch.arange(columns)[:, None, None] * 2 + torch.arange(width) - 2
    y_at = parts[:, 1] + torch.arange(rows)[:, None, None, None] + (torch.arange(height) * 2 - 1)[:, None]
    of_columns = (1 - (x_at[..., None] - torch.arange(x.shape[3])).abs()).clamp(0)
    of_rows = (1 - (y_at[..., None] - torch.arange(x.shape[2])).abs()).clamp(0)
    images = x.view(count, groups, -1, *x.shape[2:])
    read = torch.einsum("ngcyx,ngijhwy,ngijhwx,ngijhw->ngcijhw", images, of_rows, of_columns, parts[:, 2])
    return torch.einsum("ncijhw,ocij->nohw", read.flatten(1, 2), weight) + bias[:, None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [1, 2])
def test_deformable_conv2d_and_its_gradients(groups, dtype):
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 6, 7), torch.randn(5, 4, 3, 2), torch.randn(2, 3 * groups * 6, 3, 9) * 2, torch.randn(5)]
    given = [each.to(dtype) for each in given]
    found = values_and_gradients(
        lambda *inputs: torch_npu.npu_deformable_conv2d(
            *inputs, [3, 2], [1, 1, 2, 1], [1, 1, 2, 2], [1, 1, 1, 2], 1, groups
        )[0],
        *(each.npu() for each in given),
    )
    expected = values_and_gradients(
        lambda *inputs: deformable_conv2d(*inputs, groups), *(each.double() for each in given)
    )
    tolerance = 1e-4 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_offsets_without_factors_are_refused_as_by_cann():
    x, weight, offsets = torch.rand(1, 4, 4, 4).npu(), torch.rand(4, 4, 1, 1).npu(), torch.rand(1, 3, 4, 4).npu()
    with refused("modulated true only, not false"):
        torch_npu.npu_deformable_conv2d(x, weight, offsets, None, [1, 1], [1] * 4, [0] * 4, modulated=False)
        torch.npu.synchronize()


def test_contribs_module_is_a_plain_convolution_at_first_and_trains():
    torch.manual_seed(0)
    module, x = DCNv2(4, 6, 3, 2, 1), torch.randn(2, 4, 5, 5)
    expected = functional.conv2d(x, module.weight, stride=2, padding=1) / 2
    module = module.npu()
    found = module(x.npu())
    torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert module.conv_offset.weight.grad.abs().sum() > 0
