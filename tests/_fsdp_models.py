"""A model in every flavour of FSDP, and the processes that train it."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BATCH = 8
INPUTS = torch.linspace(-2, 2, 15).reshape(3, 5)


def new_model():
    """Return a model with tied layers, which 4 processes cannot share evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 6))
    model[4].weight = model[2].weight
    return model


@dataclass(frozen=True)
class Process:
    """One of the processes that train together, or a single one."""

    device: str = "cpu"
    rank: int = 0
    world_size: int = 1

    def mesh(self, *sizes):
        """Return a mesh of all processes, with dimensions named by the letters a, b ..."""
        return init_device_mesh(self.device, sizes, mesh_dim_names=tuple("ab"[: len(sizes)]))

    def device_id(self):
        """Return the device for FSDP1."""
        return torch.device("cpu") if self.device == "cpu" else torch.device("npu", torch.npu.current_device())

    def train(self, model, optimizer, seed, share=None):
        """Do a step with this process's share of a batch, or with another one."""
        batch = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(seed))
        rank, shares = share or (self.rank, self.world_size)
        optimizer.zero_grad()
        model(batch.chunk(shares)[rank].to(self.device)).square().mean().backward()
        optimizer.step()

    def evaluated(self, model):
        """Return a model's output for the same rows in every process."""
        with torch.no_grad():
            return model(INPUTS.to(self.device)).float().cpu()


def fsdp2(process, nested=True, prefetch=False, **options):
    """Return a model whose first and last layers are separate FSDP modules, or only the full model is one."""
    model = new_model().to(process.device)
    if nested:
        fully_shard(model[0], **options)
        fully_shard(model[5], **options)
    fully_shard(model, **options)
    if prefetch:
        model.set_modules_to_forward_prefetch([model[0], model[5]])
    return model


def hsdp(process, **options):
    """Return a model that is sharded over each of two pairs of processes."""
    return fsdp2(process, mesh=process.mesh(2, 2), **options)


def tensor_parallel(process):
    """Return a model whose layers are tensor-parallel and sharded."""
    mesh = process.mesh(2, 2)
    model = new_model().to(process.device)
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "5": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh["b"], plan)
    fully_shard(model[0], mesh=mesh["a"])
    return fully_shard(model, mesh=mesh["a"])


def fsdp1(process, strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True, **options):
    """Return a FullyShardedDataParallel that contains another one."""
    options |= {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    options["device_id"] = process.device_id()
    model = new_model().to(process.device)
    model[0] = FullyShardedDataParallel(model[0], **options)
    return FullyShardedDataParallel(model, **options)


# Torch trains wrongly if a forward pass with a graph has no backward pass, and finds no accelerator on a CPU.
OFFLOADED_FSDP1 = "FSDP1, CPU offload"
_SHARD_GRADS = ShardingStrategy.SHARD_GRAD_OP
HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLAVOURS = {
    "fully_shard": fsdp2,
    "fully_shard of the root": partial(fsdp2, nested=False),
    "reshard_after_forward=True": partial(fsdp2, reshard_after_forward=True),
    "reshard_after_forward=False": partial(fsdp2, reshard_after_forward=False),
    "reshard_after_forward=2": partial(fsdp2, reshard_after_forward=2),
    "prefetch": partial(fsdp2, prefetch=True),
    "mixed precision": partial(fsdp2, mp_policy=HALVES),
    "CPU offload": partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "HSDP": hsdp,
    "HSDP, reshard_after_forward=False": partial(hsdp, reshard_after_forward=False),
    "FSDP and TP": tensor_parallel,
    "FSDP1": fsdp1,
    "FSDP1, SHARD_GRAD_OP": partial(fsdp1, strategy=_SHARD_GRADS),
    "FSDP1, NO_SHARD": partial(fsdp1, strategy=ShardingStrategy.NO_SHARD),
    OFFLOADED_FSDP1: partial(fsdp1, cpu_offload=CPUOffload(offload_params=True)),
    "FSDP1, FlatParameter": partial(fsdp1, use_orig_params=False),
    "FSDP1, FlatParameter, flatten=True": partial(fsdp1, use_orig_params=False),
    "FSDP1, FlatParameter, SHARD_GRAD_OP": partial(fsdp1, strategy=_SHARD_GRADS, use_orig_params=False),
}
OF_EACH_KIND = ("fully_shard", "FSDP1")


def flavours_on(device):
    """Return the flavours that torch supports on a device."""
    return [name for name in FLAVOURS if (device, name) != ("cpu", OFFLOADED_FSDP1)]
