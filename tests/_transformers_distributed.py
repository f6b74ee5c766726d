"""Patched language models in two processes, for test_transformers_wrapped.py; the first one saves what was found."""

import json
import sys
from pathlib import Path

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops.integrations.transformers import patch_model

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests._language_models import CHUNK, Largest, batch, make

PROCESSES = 2


def share(rank: int) -> dict[str, torch.Tensor]:
    """Return the rows of a process."""
    return {name: one.chunk(PROCESSES)[rank] for name, one in batch().items()}


def _patched(family="llama"):
    return patch_model(make(family), chunk_size=CHUNK)


def _ddp(**options):
    return lambda mesh: DistributedDataParallel(_patched(), **options)


def _fully_sharded(groups=lambda model: [], family="llama", patch_last=False, **options):
    def shard(mesh):
        model = make(family) if patch_last else _patched(family)
        for group in (*model.model.layers, *groups(model), model):
            fully_shard(group, mesh=mesh, **options)
        return patch_model(model, chunk_size=CHUNK)

    return shard


def _head(model):
    return [model.lm_head]


def _norm_and_head(model):
    return [[model.model.norm, model.lm_head]]


TRAININGS = {
    "DDP": _ddp(),
    "DDP that looks for unused parameters": _ddp(find_unused_parameters=True),
    "DDP with a static graph": _ddp(static_graph=True),
    "FSDP2": _fully_sharded(),
    "FSDP2, patched last": _fully_sharded(patch_last=True),
    "FSDP2, tied": _fully_sharded(family="gemma2"),
    "FSDP2, the head by itself": _fully_sharded(_head, reshard_after_forward=True),
    "FSDP2, the head by itself, not resharded": _fully_sharded(_head, reshard_after_forward=False),
    "FSDP2, experts, the head by itself": _fully_sharded(_head, family="mixtral", reshard_after_forward=True),
    "FSDP2, norm and head, not resharded": _fully_sharded(_norm_and_head, reshard_after_forward=False),
    "FSDP2, 16 bits": _fully_sharded(
        _head, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    ),
}


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train(wrap, rank, mesh):
    """Return the mean of the losses, the elements of the largest tensor, and the gradients."""
    model = wrap(mesh)
    for _ in range(2):  # what the first step leaves behind would show in the second
        model.zero_grad()
        with Largest() as largest:
            output = model(**share(rank))
            output.loss.backward()
    loss = output.loss.detach().clone()
    dist.all_reduce(loss)
    gradients = {name.removeprefix("module."): _whole(one.grad) for name, one in model.named_parameters()}
    return loss / PROCESSES, largest.elements, gradients


def _resharded_group(rank, mesh):
    _fully_sharded(_norm_and_head)(mesh)(**share(rank))


def _fsdp1_head(rank, mesh):
    model = _patched()
    model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=torch.device("cpu"))
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))(**share(rank))


def _patch_ddp(rank, mesh):
    patch_model(DistributedDataParallel(make()))


REFUSALS = {
    "norm and head": _resharded_group,
    "a head in FSDP1": _fsdp1_head,
    "DistributedDataParallel": _patch_ddp,
}


def _sentence(call, rank, mesh):
    try:
        call(rank, mesh)
    except Exception as error:
        return str(error)
    return "nothing was refused"


def main(folder: Path, rank: int) -> None:
    """Do every training in turn."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    found = {name: _train(wrap, rank, mesh) for name, wrap in TRAININGS.items()}
    sentences = {name: _sentence(call, rank, mesh) for name, call in REFUSALS.items()}
    if rank == 0:
        torch.save(found, folder / "found.pt")
        (folder / "sentences.json").write_text(json.dumps(sentences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
