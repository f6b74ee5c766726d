"""Attention of DTensors, and of a sequence that ranks share, with torch_npu's kernels on two simulated NPUs."""

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from host_npu import testing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

_SHAPE = (2, 4, 32, 16)


def _tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(_SHAPE, generator=generator) for _ in range(4)]


def _expected(is_causal):
    *inputs, weight = (each.double() for each in _tensors())
    leaves = [each.requires_grad_() for each in inputs]
    result = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    return [result, *torch.autograd.grad(result, leaves, weight)]


def _error(found, is_causal):
    pairs = zip(found, _expected(is_causal), strict=True)
    return max((actual.cpu().double() - wanted).abs().max().item() for actual, wanted in pairs)


def _of_dtensors(device, dim, is_causal):
    """Return the largest error of attention and its gradients for tensors sharded in a dimension."""
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    *inputs, weight = (distribute_tensor(each.npu(), mesh, [Shard(dim)]) for each in _tensors())
    leaves = [each.requires_grad_() for each in inputs]
    result = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    found = [result, *torch.autograd.grad(result, leaves, weight)]
    return _error([each.full_tensor() for each in found], is_causal)


def _of_a_shared_sequence(device, module):
    """Return the largest error of causal attention and its gradients, where each rank has a part of the sequence."""
    parallel = importlib.import_module(module)
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    *leaves, weight = (each.npu() for each in _tensors())
    # It replaces the function in torch.nn.functional.
    with parallel.context_parallel(mesh, buffers=[*leaves, weight], buffer_seq_dims=[2] * 4):
        own = [each.detach().clone().requires_grad_() for each in leaves]
        result = F.scaled_dot_product_attention(*own, is_causal=True)
        gradients = torch.autograd.grad(result, own, weight)
        found = parallel.context_parallel_unshard(mesh, [result.detach(), *gradients], [2] * 4)
    return _error(found, True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dim", [0, 1], ids=["batches", "heads"])
def test_attention_of_dtensors_is_that_of_float64(dim, is_causal):
    errors = testing.run(_of_dtensors, 2, dim, is_causal, device="npu")
    assert max(errors) < 2e-6


_MODULES = {
    "torch's": "torch.distributed.tensor.experimental._attention",
    "torch_npu's": "torch_npu.distributed.tensor.experimental._context_parallel",
}


_VERSION = ".".join(torch.__version__.split(".")[:2])
# The errors of torch_npu's own function, as in docs/limits.md.
_RAISES = {
    "2.9": "No module named 'torch_npu.distributed.tensor.experimental'",
    "2.14": r"TypeError: _npu_fa_v3_cp_strategy\(\)",
}


@pytest.mark.skipif(_VERSION in _RAISES, reason="context_parallel raises")
@pytest.mark.parametrize("module", _MODULES.values(), ids=_MODULES)
def test_a_context_parallel_sequence_has_the_attention_of_float64(module):
    errors = testing.run(_of_a_shared_sequence, 2, module, device="npu")
    assert max(errors) < 2e-6


@pytest.mark.skipif(_VERSION not in _RAISES, reason="context_parallel works")
def test_context_parallel_raises_with_the_versions_of_the_page():
    with pytest.raises(AssertionError, match=_RAISES[_VERSION]):
        testing.run(_of_a_shared_sequence, 2, _MODULES["torch_npu's"], device="npu")
