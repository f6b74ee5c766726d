"""One of two processes with an NPU and half of a vocabulary, for test_vocab_parallel.py; saves what it found."""

import sys
from pathlib import Path

import torch_aclnn_ops  # isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops import functional as F

import torch
import torch.distributed as dist

ROWS, FEATURES, CLASSES = 24, 16, 288
# Number of classes of each rank, and options of the function.
CASES = {
    "fused": ((160, 128), {}),
    "fused with a z-loss": ((128, 160), {"lse_square_scale": 0.1, "reduction": "sum"}),
    "one shard too small for the operators": ((200, 88), {}),
    "one shard without classes": ((288, 0), {}),
    "label smoothing": ((160, 128), {"label_smoothing": 0.1}),
}


def gradients(sizes, rank, device, options):
    """Return the loss and its gradients by input and head; without a rank, those of the whole head."""
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
    return [tensor.detach().cpu() for tensor in found]


def main(folder: str, rank: str) -> None:
    """Run all cases as one of the processes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    found = {}
    for name, (sizes, options) in CASES.items():
        before = torch_aclnn_ops.launches()
        results = gradients(sizes, int(rank), "npu", options)
        launches = {operator: n - before.get(operator, 0) for operator, n in torch_aclnn_ops.launches().items()}
        found[name] = results, {operator: n for operator, n in launches.items() if n}
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
