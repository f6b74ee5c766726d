"""Tensors in a private format, where strides say nothing."""

from torch_aclnn_ops import ops

import pytest
import torch

from tests import test_ema_adam

_NZ = 29


@pytest.fixture
def make_nz():
    """Make a tensor in the format FRACTAL_NZ."""
    import torch_npu

    torch.npu.config.allow_internal_format = True
    yield lambda dtype: torch_npu.empty_with_format((64, 64), dtype=dtype, device="npu", acl_format=_NZ)
    torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize("name", test_ema_adam.STATE)
def test_adam_raises_for_in_place_arguments(name, make_nz):
    tensors = {other: torch.rand(64, 64).half().npu() for other in ("grad", *test_ema_adam.STATE)}
    tensors[name] = make_nz(torch.float16)
    with pytest.raises(RuntimeError, match=f"{name}Ref is written in place, so it must not be in a private format"):
        ops.apply_fused_ema_adam_(**tensors, step=torch.tensor([1]).npu(), **test_ema_adam.OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (40, 20), (3, 17, 33)])
@pytest.mark.usefixtures("make_nz")
def test_an_input_is_cast(dtype, shape):
    import torch_npu

    grad_output, input, target = (torch.rand(shape).to(dtype).npu() for _ in range(3))
    tiled = torch_npu.npu_format_cast(grad_output, _NZ)
    assert torch_npu.get_npu_format(tiled) == _NZ
    result = ops.mse_loss_backward.overload(tiled, input, target, 0)
    assert torch.equal(result, ops.mse_loss_backward.overload(grad_output, input, target, 0))
    assert torch.equal(torch_npu.npu_format_cast(tiled, 2), grad_output)
