"""Losses of half of a vocabulary on one of two processes with an NPU, for test_vocab_parallel.py."""

from functools import partial

import torch_aclnn_ops  # isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops import functional as F

import host_npu
import torch
import torch.distributed as dist
from host_npu.testing import results_of

ROWS, FEATURES, CLASSES = 24, 16, 288
# Number of classes of each rank, and options of the function.
CASES = {
    "fused": ((160, 128), {}),
    "fused with a z-loss": ((128, 160), {"lse_square_scale": 0.1, "reduction": "sum"}),
    "one shard too small for the operators": ((200, 88), {}),
    "one shard without classes": ((288, 0), {}),
    "label smoothing": ((160, 128), {"label_smoothing": 0.1}),
}


def gradients(sizes, options, device, rank=None):
    """Return the loss and the gradients of input and head; without a rank, those of the full head."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(ROWS, FEATURES, generator=generator).bfloat16()
    weight = (0.2 * torch.randn(CLASSES, FEATURES, generator=generator)).bfloat16()
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[3] = -100
    if rank is not None:
        weight = weight.split(sizes)[rank]
        options = {"process_group": dist.group.WORLD, "vocab_sizes": sizes, **options}
    input, weight = (tensor.to(device).requires_grad_() for tensor in (input, weight))
    loss = F.linear_cross_entropy(input, weight, target.to(device), **options)
    found = (loss, *torch.autograd.grad(loss, (input, weight)))
    assert all(tensor.device.type == device for tensor in found)
    return found


def _counted(sizes, options, device):
    """Return the gradients, and how often which operators of this package and which collectives were launched."""
    before = torch_aclnn_ops.launches(), host_npu.stats().collectives
    found = gradients(sizes, options, device, dist.get_rank())
    torch.npu.synchronize()
    after = torch_aclnn_ops.launches(), host_npu.stats().collectives
    return found, *(_difference(*counts) for counts in zip(before, after, strict=True))


def _difference(before, after):
    return {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}


def results(device):
    """Run all cases as one of the processes."""
    return results_of((name, partial(_counted, *case, device)) for name, case in CASES.items())


def divergence_of_an_empty_shard(device):
    """The loss and the gradient of the student's shard; the second process has no classes."""
    generator = torch.Generator().manual_seed(0)
    input, weight, rows, head = (torch.randn(3, 2, generator=generator) for _ in range(4))
    bias, here = torch.randn(3, generator=generator), slice(0, 3) if dist.get_rank() == 0 else slice(3, 3)
    shard = weight[here].to(device).requires_grad_()
    teacher = {"teacher_bias": bias[here].to(device), "linear_bias": bias[here].to(device)}
    given = input.to(device), shard, rows.to(device), head[here].to(device)
    loss = F.linear_kl_div(*given, **teacher, process_group=dist.group.WORLD)
    loss.backward()
    whole = F.linear_kl_div(input, weight, rows, head, teacher_bias=bias, linear_bias=bias)
    return loss.item(), shard.grad.cpu(), whole.item()
