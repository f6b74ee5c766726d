"""Models with TRL's fused head, and what patches them without a trainer."""

from torch_aclnn_ops.integrations.trl import patch_trainer

import torch
from accelerate import Accelerator
from trl.trainer.utils import add_fused_lm_head

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
