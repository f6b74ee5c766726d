"""TRL's fused head in two processes, patched, for test_trl.py."""

from functools import partial

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from host_npu.testing import results_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests._language_models import make
from tests._transformers_distributed import PROCESSES, share
from tests._trl_heads import fused, patched


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
