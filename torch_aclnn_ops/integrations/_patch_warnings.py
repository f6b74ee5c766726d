"""Warnings of patched models whose loss saves no memory."""

import warnings
from typing import Any, cast

from torch_aclnn_ops.integrations._head_layers import is_plain
from torch_aclnn_ops.integrations._materializations import CURE, Materializations

import torch
from torch import nn

NO_LABELS = (
    "it was called in training without labels, as by a Trainer with label_smoothing_factor or compute_loss_func; call"
    " patch_model(model, lazy_without_labels=True), or pass labels to the model"
)
IN_WRAPPER = (
    "it was called in training without labels in a wrapper that searches its outputs for tensors, as fully_shard and"
    " FSDP1 do; pass labels to the model, or to DistributedDataParallel find_unused_parameters=False and"
    " static_graph=False (to a Trainer ddp_find_unused_parameters=False)"
)


def warn_of_reason(model: nn.Module, record: Materializations, is_fused_by_trl: bool) -> None:
    """Warn of the reason why a loss needed logits, if they are those of the head."""
    head = cast(Any, model).get_output_embeddings()
    weight = getattr(head, "weight", None)
    if is_fused_by_trl:
        reason = (
            "TRL's fused head does not call the model's; call patch_trainer of torch_aclnn_ops.integrations.trl with"
            " its trainer"
        )
    elif record.operation is not None:
        reason = f"{record.operation} needs them; {CURE}"
    elif not record.heads and model.training and not getattr(head, "training", True):
        reason = "its head is in evaluation mode; call train() of the model, or unpatch_model"
    elif not record.heads and isinstance(weight, torch.Tensor) and not is_plain(weight):
        reason = f"the weight of its head is a {type(weight).__name__}, not a plain tensor; call unpatch_model"
    elif not record.heads:
        reason = (
            f"its head, a {type(head).__name__}, was not called as a linear layer, the model or an adapter computes"
            " with its weights; use another adapter for the head, or unpatch_model"
        )
    else:
        return
    record.is_told = True
    warn(model, reason)


def warn(model: nn.Module, reason: str) -> None:
    """Warn that a model's loss saves no memory."""
    warnings.warn(
        f"patch_model: the loss of this {type(model).__name__} is not computed by linear_cross_entropy and saves no"
        f" memory: {reason}",
        stacklevel=2,
    )
