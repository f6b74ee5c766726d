"""Patched language models in two processes, for test_transformers_wrapped.py."""

from functools import partial

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops.integrations.transformers import patch_model

import torch
import torch.distributed as dist
from host_npu.testing import results_of
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests._language_models import CHUNK, batch, make
from tests._modes import Largest
from tests._own_losses import WithOwnLoss

PROCESSES = 2


def share(rank: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return the rows of a process."""
    return {name: one.chunk(PROCESSES)[rank].to(device) for name, one in batch().items()}


def _own_loss(wrap):
    return lambda mesh: WithOwnLoss(wrap(mesh))


def _ddp(**options):
    return lambda mesh: DistributedDataParallel(_patched(mesh), **options)


def _make(mesh, family="llama"):
    # On a device experts count their rows by a histogram of integers, which the host NPU does not have.
    return make(family, experts_implementation="eager").to(mesh.device_type)


def _patched(mesh, family="llama"):
    return patch_model(_make(mesh, family), chunk_size=CHUNK, lazy_without_labels=True)


def _fully_sharded(groups=lambda model: [], family="llama", patch_last=False, **options):
    def shard(mesh):
        model = _make(mesh, family) if patch_last else _patched(mesh, family)
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
    "DDP, a loss of its own": _own_loss(_ddp()),
    "FSDP2, 16 bits": _fully_sharded(
        _head, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    ),
}


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train(wrap, mesh):
    """Return the mean of the losses, the elements of the largest tensor, and the gradients."""
    model = wrap(mesh)
    for _ in range(2):  # what the first step leaves behind would show in the second
        model.zero_grad()
        with Largest() as largest:
            loss = model(**share(mesh.get_rank(), mesh.device_type))["loss"]
            loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    prefix = "model.module." if isinstance(model, WithOwnLoss) else "module."
    gradients = {name.removeprefix(prefix): _whole(one.grad) for name, one in model.named_parameters()}
    return loss / PROCESSES, largest.elements, gradients


def _resharded_group(mesh):
    _fully_sharded(_norm_and_head)(mesh)(**share(mesh.get_rank(), mesh.device_type))


def _fsdp1_head(mesh):
    model, device = _patched(mesh), torch.device(mesh.device_type)
    model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=device)
    FullyShardedDataParallel(model, device_id=device)(**share(mesh.get_rank(), mesh.device_type))


def _adapted_head(mesh):
    model = get_peft_model(_make(mesh), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    for module in (model.base_model.model.lm_head, model):
        fully_shard(module, mesh=mesh)
    patch_model(model)(**share(mesh.get_rank(), mesh.device_type))


def _patch_ddp(mesh):
    patch_model(DistributedDataParallel(_make(mesh)))


REFUSALS = {
    "norm and head": _resharded_group,
    "a head in FSDP1": _fsdp1_head,
    "a head with adapters by itself": _adapted_head,
    "DistributedDataParallel": _patch_ddp,
}


def results(device):
    """Do every training in turn, and every call that is refused."""
    mesh = init_device_mesh(device, (PROCESSES,))
    trainings = ((name, partial(_train, wrap, mesh)) for name, wrap in TRAININGS.items())
    refusals = ((name, partial(call, mesh)) for name, call in REFUSALS.items())
    return results_of(trainings) | results_of(refusals)
