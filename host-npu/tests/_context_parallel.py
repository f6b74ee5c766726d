"""Attention of DTensors and of sequences that two ranks share, for test_context_parallel.py."""

import importlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def of_dtensors(device, dim, is_causal):
    """Return the largest error of attention and its gradients, of tensors that are cut in a dimension."""
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    *inputs, weight = (distribute_tensor(each.npu(), mesh, [Shard(dim)]) for each in _tensors())
    leaves = [each.requires_grad_() for each in inputs]
    result = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    found = [result, *torch.autograd.grad(result, leaves, weight)]
    return _error([each.full_tensor() for each in found], is_causal)


def of_a_shared_sequence(device, module):
    """Return the largest error of causal attention and its gradients, of which each rank has a part of the sequence."""
    parallel = importlib.import_module(module)
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    *leaves, weight = (each.npu() for each in _tensors())
    # It replaces the function of torch.nn.functional.
    with parallel.context_parallel(mesh, buffers=[*leaves, weight], buffer_seq_dims=[2] * 4):
        own = [each.detach().clone().requires_grad_() for each in leaves]
        result = F.scaled_dot_product_attention(*own, is_causal=True)
        gradients = torch.autograd.grad(result, own, weight)
        found = parallel.context_parallel_unshard(mesh, [result.detach(), *gradients], [2] * 4)
    return _error(found, True)
