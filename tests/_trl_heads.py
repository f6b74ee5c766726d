"""Models with TRL's fused head, what patches them without a trainer, and their training in two processes."""

from functools import partial

from torch_aclnn_ops.integrations.trl import patch_trainer

import torch
from accelerate import Accelerator
from host_npu.testing import results_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trl.trainer.utils import add_fused_lm_head

from tests._language_models import PROCESSES, make, share

CHUNK = 16
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def fused(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    """Give a model TRL's fused head, with all its outputs."""
    add_fused_lm_head(model, **{"outputs": _OUTPUTS, **options})
    return model


class OfModel:
    """What patch_trainer reads of a trainer, of a model that has TRL's fused head."""

    is_fsdp_enabled = False
    ref_model = None

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.accelerator = model, Accelerator()


def patched(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    """Patch a model that has TRL's fused head."""
    patch_trainer(OfModel(model), **{"chunk_size": CHUNK, **options})
    return model


def _fully_sharded(model, mesh, patch_last):
    model = model if patch_last else patched(model)
    for group in (*model.model.layers, model):
        fully_shard(group, mesh=mesh)
    return patched(model)


TRAININGS = {
    "DDP": lambda model, mesh: DistributedDataParallel(patched(model)),
    "FSDP2": partial(_fully_sharded, patch_last=False),
    "FSDP2, patched last": partial(_fully_sharded, patch_last=True),
}


def _gradients(wrap, mesh):
    model = wrap(fused(make()), mesh)
    model(**share(mesh.get_rank()), fused_lm_head=True).log_probs.sum().backward()
    gradients = {name.removeprefix("module."): one.grad for name, one in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in gradients.items()}


def results(device):
    """Return the gradients of every training."""
    mesh = init_device_mesh(device, (PROCESSES,))
    return results_of((name, partial(_gradients, wrap, mesh)) for name, wrap in TRAININGS.items())
