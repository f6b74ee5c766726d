"""One of two ranks with NPUs, which counts what a scaled-down model sends and allocates, for test_plan.py."""

import json
import sys
import time
from typing import NamedTuple

from torch_aclnn_ops import functional as F
from torch_aclnn_ops.plan import Layers

import host_npu
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaModel

ROWS, HIDDEN, VOCAB = 96, 64, 512
_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Case(NamedTuple):
    """A Llama, and how it is trained."""

    rows: int
    hidden: int
    vocab: int
    layers: Layers
    checkpointing: bool
    side: str = "others"


# In each another term of the plan is the largest.
LLAMAS = {
    "activations": Case(512, 256, 512, Layers(3, 8, 2, 704), False),
    "recomputed": Case(1024, 256, 512, Layers(2, 8, 2, 704), True),
    "weights": Case(64, 768, 1024, Layers(3, 8, 2, 2048), True),
    "head": Case(256, 256, 8192, Layers(2, 8, 2, 704), True, "ours"),
}


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
    for module in (model.embedding, model.layer, model.head, model):
        fully_shard(module, mp_policy=_POLICY)
    tokens = torch.randint(VOCAB, (ROWS,)).npu()

    def head(hidden: torch.Tensor) -> None:
        F.linear_cross_entropy(hidden, model.head.weight, tokens, fsdp_module=model).backward()

    hidden = model(tokens)
    head(hidden)  # makes what is made once
    return {"FSDP2": sent(lambda: head(model(tokens))), "of these the head's": sent(lambda: head(hidden.detach()))}


class Llama(torch.nn.Module):
    """The layers of transformers' Llama and a head, whose loss is not computed in the forward pass."""

    def __init__(self, hidden: int, vocab: int, layers: Layers, attention: str = "flash_attention_2"):
        super().__init__()
        self.body = LlamaModel(
            LlamaConfig(
                hidden_size=hidden,
                vocab_size=vocab,
                num_hidden_layers=layers.number,
                num_attention_heads=layers.heads,
                num_key_value_heads=layers.kv_heads,
                intermediate_size=layers.intermediate,
                use_cache=False,
                attn_implementation=attention,
                dtype=torch.bfloat16,
            )
        ).float()
        self.head = torch.nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens):
        return self.body(tokens).last_hidden_state


def llama(case: Case) -> dict[str, int]:
    """Return the bytes that are held after the forward pass, and the peak, beyond those before the step."""
    model = Llama(case.hidden, case.vocab, case.layers).npu()
    if case.checkpointing:
        model.body.gradient_checkpointing_enable({"use_reentrant": False})
    for module in (model.body.embed_tokens, *model.body.layers, model.body.norm, model.head, model):
        fully_shard(module, mp_policy=_POLICY)
    tokens = torch.randint(case.vocab, (1, case.rows)).npu()
    for _ in range(2):  # gradients are made in the first step
        before = settled()
        torch.npu.reset_peak_memory_stats()
        hidden = model(tokens)
        held = settled() - before
        loss(model, hidden, tokens, case.side).backward()
        del hidden
        torch.npu.synchronize()
        peak = torch.npu.max_memory_allocated() - before
    return {"held": held, "peak": peak}


def loss(model: Llama, hidden: torch.Tensor, tokens: torch.Tensor, side: str) -> torch.Tensor:
    """Return the loss with the package, or without it."""
    if side == "ours":
        return F.linear_cross_entropy(hidden, model.head.weight, tokens, shift=True, fsdp_module=model)
    return torch.nn.functional.cross_entropy(model.head(hidden)[0].float(), tokens[0])


def settled() -> int:
    """Return the bytes in use once they are stable: torch_npu's thread releases what is no longer used."""
    torch.npu.synchronize()
    reads = [-1]
    while len(set(reads[-4:])) > 1 or len(reads) < 4:
        time.sleep(0.05)
        reads.append(torch.npu.memory_allocated())
    return reads[-1]


def main(folder: str, rank: str, *llamas: str) -> None:
    """Count everything, with these Llamas, and save it."""
    torch.npu.set_device(int(rank))
    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(vocab_parallel() | fsdp() | {name: llama(LLAMAS[name]) for name in llamas}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
