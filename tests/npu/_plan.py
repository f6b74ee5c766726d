"""One of two ranks with NPUs, which counts what a scaled-down model sends, for test_plan.py."""

import json
import sys

from torch_aclnn_ops import functional as F

import host_npu
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROWS, HIDDEN, VOCAB = 96, 64, 512


class Model(torch.nn.Module):
    """An embedding, a layer and a head, whose loss is not computed in the forward pass."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens))


def sent(run) -> dict[str, int]:
    """Return the bytes that other ranks read of this one while something runs, by function of HCCL."""
    torch.npu.synchronize()
    host_npu.reset()
    run()
    torch.npu.synchronize()
    return host_npu.stats().collective_bytes


def vocab_parallel() -> dict[str, dict[str, int]]:
    """Count in forward and backward of a loss whose vocabulary is split."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16().npu().requires_grad_()
    weight = torch.randn(VOCAB // 2, HIDDEN, generator=generator).bfloat16().npu().requires_grad_()
    target = torch.randint(VOCAB, (ROWS,), generator=generator).npu()
    options = {"process_group": dist.group.WORLD, "vocab_sizes": (VOCAB // 2, VOCAB // 2)}
    return {"vocab-parallel": sent(lambda: F.linear_cross_entropy(input, weight, target, **options).backward())}


def fsdp() -> dict[str, dict[str, int]]:
    """Count in forward and backward of a model that FSDP2 shards, and in those of its head."""
    torch.manual_seed(0)
    model = Model().npu()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model.embedding, model.layer, model.head, model):
        fully_shard(module, mp_policy=policy)
    tokens = torch.randint(VOCAB, (ROWS,)).npu()

    def head(hidden: torch.Tensor) -> None:
        F.linear_cross_entropy(hidden, model.head.weight, tokens, fsdp_module=model).backward()

    hidden = model(tokens)
    head(hidden)  # makes what is made once
    return {"FSDP2": sent(lambda: head(model(tokens))), "of these the head's": sent(lambda: head(hidden.detach()))}


def main(folder: str, rank: str) -> None:
    """Count everything, and save it."""
    torch.npu.set_device(int(rank))
    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(vocab_parallel() | fsdp(), file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
