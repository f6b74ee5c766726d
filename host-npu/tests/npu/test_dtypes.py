"""float64 and complex numbers, which CANN's documents of some operators do not list, as a device refuses them."""

import pytest
import torch
import torch.nn.functional as F

_CALLS = {
    "aclnnMatmul": lambda x: x @ x.T,
    "aclnnMm": lambda x: torch.mm(x, x.T),
    "aclnnBatchMatMul": lambda x: torch.bmm(x[None], x[None].mT),
    "aclnnAddmm": lambda x: torch.addmm(x[:, :3], x, x.T),
    "aclnnBaddbmm": lambda x: torch.baddbmm(x[None, :, :3], x[None], x[None].mT),
    "aclnnConvolution": lambda x: F.conv1d(x[None], x[None, :, :2]),
    "aclnnGelu": F.gelu,
    "aclnnSilu": F.silu,
    "aclnnHardswish": F.hardswish,
    "aclnnHardsigmoid": F.hardsigmoid,
    "aclnnRelu": torch.relu,
    "aclnnSoftplus": F.softplus,
    "aclnnMish": F.mish,
    "aclnnSmoothL1Loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "aclnnBatchNorm": lambda x: F.batch_norm(x, None, None, training=True),
    "aclnnGroupNorm": lambda x: F.group_norm(x, 2),
    "aclnnAvgPool2d": lambda x: F.avg_pool2d(x[None], 2),
    "aclnnAdaptiveAvgPool2d": lambda x: F.adaptive_avg_pool2d(x[None], 2),
    "aclnnMaxPool2dWithMask": lambda x: F.max_pool2d(x[None], 2),
    "aclnnLayerNorm": lambda x: F.layer_norm(x, (4,)),
    "aclnnExpm1": torch.expm1,
    "aclnnRepeatInterleave": lambda x: x.repeat_interleave(2, 1),
}


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with a gradient"])
def test_an_operator_refuses_float64_with_the_code_and_the_list_of_the_device(name, requires_grad):
    x = torch.randn(3, 4, dtype=torch.float64)
    message = (
        rf"call {name} failed, error code is 161002\nEZ1001: Tensor self not implemented for DT_DOUBLE, should be in"
    )
    with pytest.raises(RuntimeError, match=message):
        _CALLS[name](x.npu().requires_grad_(requires_grad))
    # The queue goes on, and float32 is computed.
    torch.testing.assert_close(_CALLS[name](x.float().npu()).cpu(), _CALLS[name](x.float()))


def test_complex_numbers_are_added_but_not_indexed():
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert (x.npu() + 1).cpu().equal(x + 1)
    with pytest.raises(RuntimeError, match="call aclnnIndex failed, error code is 161002\nEZ1001: .* for DT_COMPLEX64"):
        x.npu()[torch.tensor([0, 1]).npu()]
    with pytest.raises(RuntimeError, match="call aclnnAdd failed, error code is 161002\nEZ1001: .* for DT_COMPLEX32"):
        x.to(torch.complex32).npu() + 1


def test_what_an_ai_cpu_computes_takes_float64():
    x = torch.randn(3, 4, dtype=torch.float64)
    assert x.npu().softmax(-1).cpu().equal(x.softmax(-1))
    assert (x.npu() + x.npu())[torch.tensor([0, 2]).npu()].cpu().equal((x + x)[[0, 2]])
