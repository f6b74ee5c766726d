"""Trainings in several processes, for test_optim_distributed.py; a process writes what it found as JSON."""

import gc
import json
import sys
import warnings
from pathlib import Path

from torch_aclnn_ops.optim import FusedEmaAdam

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BATCH = 12  # divides by 2 and by 3 processes
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "ema_decay": 0.9, "ema_warmup": "ratio", "ema_start_step": 1}


def make_model(dtype=torch.float64):
    """Return a model whose parameters 3 processes cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def train(model, optimizer, steps, rank=0, world_size=1):
    """Train on this process's share of each batch."""
    for step in steps:
        batch = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(batch.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()


def whole(tensor):
    """Return a tensor with the shards of all processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def found(model, optimizer):
    """Return weights and averages as lists."""
    weights = [whole(weight.detach()).tolist() for weight in model.parameters()]
    averages = [whole(optimizer.state[weight]["ema_params"]).tolist() for weight in model.parameters()]
    return weights, averages


def ddp(rank, world_size, folder, flatten=False, **ddp_options):
    """DistributedDataParallel."""
    model = DistributedDataParallel(make_model(), **ddp_options)
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS, flatten=flatten)
    train(model, optimizer, range(6), rank, world_size)
    return found(model, optimizer)


def ddp_flattened(rank, world_size, folder):
    """DistributedDataParallel with flattened parameters."""
    return ddp(rank, world_size, folder, flatten=True)


def ddp_flattened_with_bucket_views(rank, world_size, folder):
    """Gradients that are parts of DDP's buckets."""
    return ddp(rank, world_size, folder, flatten=True, gradient_as_bucket_view=True)


def make_sharded():
    """Return a model with DTensor parameters."""
    model = make_model()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def fsdp(rank, world_size, folder):
    """fully_shard: parameters, states and the exported average are DTensors."""
    model = make_sharded()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    train(model, optimizer, range(6), rank, world_size)
    state = optimizer.state[next(model.parameters())]
    assert all(type(state[name]).__name__ == "DTensor" for name in ("exp_avg", "exp_avg_sq", "ema_params"))
    weights, averages = found(model, optimizer)
    with optimizer.swap_ema_params():
        assert [whole(weight.detach()).tolist() for weight in model.parameters()] == averages
    assert found(model, optimizer) == (weights, averages)
    exported = optimizer.ema_state_dict(model)
    assert [whole(value).tolist() for value in exported.values()] == averages
    return weights, averages


def fsdp_flattened(rank, world_size, folder):
    """Shards are not flattened, and train all the same."""
    model = make_sharded()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS, flatten=True)
    train(model, optimizer, range(6), rank, world_size)
    return found(model, optimizer)


def fsdp_checkpoint(rank, world_size, folder):
    """A run that goes on from a torch.distributed.checkpoint, in an optimizer without state."""
    model = make_sharded()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    train(model, optimizer, range(3), rank, world_size)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    model = make_sharded()
    optimizer = FusedEmaAdam(model.parameters(), **OPTIONS)
    weights, state = get_state_dict(model, optimizer)
    contents = {"model": weights, "optimizer": state}
    dcp.load(contents, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(model, optimizer, model_state_dict=contents["model"], optim_state_dict=contents["optimizer"])
    train(model, optimizer, range(3, 6), rank, world_size)
    return found(model, optimizer)


def zero(rank, world_size, folder, flatten=False):
    """ZeroRedundancyOptimizer: each process has the states of some parameters; loaded half way."""
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedEmaAdam, **OPTIONS, flatten=flatten)
    train(model, optimizer, range(3), rank, world_size)
    optimizer.consolidate_state_dict(to=0)
    contents = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(contents, src=0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedEmaAdam, **OPTIONS, flatten=flatten)
    optimizer.load_state_dict(contents[0])
    train(model, optimizer, range(3, 6), rank, world_size)
    optimizer.consolidate_state_dict(to=0)
    if rank != 0:
        return None
    states = optimizer.state_dict()["state"]
    weights = [weight.tolist() for weight in model.parameters()]
    return weights, [states[i]["ema_params"].tolist() for i in range(len(weights))]


def zero_flattened(rank, world_size, folder):
    """ZeroRedundancyOptimizer whose parts are flattened."""
    return zero(rank, world_size, folder, flatten=True)


ALL = (
    ddp,
    ddp_flattened,
    ddp_flattened_with_bucket_views,
    fsdp,
    fsdp_flattened,
    fsdp_checkpoint,
    zero,
    zero_flattened,
)


def main(folder: str, rank: str, world_size: str) -> None:
    """Run all trainings as one of the processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(world_size))
    results = {each.__name__: each(int(rank), int(world_size), folder) for each in ALL}
    if rank == "0":
        Path(folder, "results.json").write_text(json.dumps(results))
    gc.collect()  # a model that is alive keeps gloo's threads, which must not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
