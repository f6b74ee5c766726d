"""Tensors in a private format, where strides say nothing."""

import os

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
def test_adam_refuses_it_for_what_it_writes_in_place(name, make_nz):
    tensors = {other: torch.rand(64, 64).half().npu() for other in ("grad", *test_ema_adam.STATE)}
    tensors[name] = make_nz(torch.float16)
    with pytest.raises(RuntimeError, match=f"{name}Ref is written in place, so it must not be in a private format"):
        ops.apply_fused_ema_adam_(**tensors, step=torch.tensor([1]).npu(), **test_ema_adam.OPTIONS)


@pytest.mark.skipif(os.environ.get("TASK_QUEUE_ENABLE") != "0", reason="a failed cast would stop the queue for good")
def test_an_input_is_cast(make_nz):
    one = torch.rand(64, 64).half().npu()
    try:
        result = ops.mse_loss_backward.overload(make_nz(torch.float16), one, one, 0)
    except RuntimeError as error:
        # The host NPU has no private formats. That torch_npu was asked for a cast is all that can be seen on it.
        assert "Identity" in str(error) or "TransData" in str(error)
    else:
        assert result.shape == one.shape
