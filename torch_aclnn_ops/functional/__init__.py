"""Drop-in replacements for :mod:`torch.nn.functional`, their autograd Functions, and the functional optimizer step."""

import inspect as _inspect
from typing import TYPE_CHECKING as _TYPE_CHECKING

from torch_aclnn_ops._checks import raise_for_missing_names as _raise_for_missing_names
from torch_aclnn_ops.functional.binary_cross_entropy import BinaryCrossEntropyFunction as BinaryCrossEntropyFunction
from torch_aclnn_ops.functional.binary_cross_entropy import binary_cross_entropy as binary_cross_entropy
from torch_aclnn_ops.functional.ema_adam import fused_ema_adam as fused_ema_adam
from torch_aclnn_ops.functional.embedding import EmbeddingFunction as EmbeddingFunction
from torch_aclnn_ops.functional.embedding import embedding as embedding
from torch_aclnn_ops.functional.linear_cross_entropy import LinearCrossEntropyOutput as LinearCrossEntropyOutput
from torch_aclnn_ops.functional.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from torch_aclnn_ops.functional.linear_kl_div import linear_kl_div as linear_kl_div
from torch_aclnn_ops.functional.mse_loss import MSELossFunction as MSELossFunction
from torch_aclnn_ops.functional.mse_loss import mse_loss as mse_loss
from torch_aclnn_ops.functional.policy import grpo_loss as grpo_loss
from torch_aclnn_ops.functional.preference import cpo_loss as cpo_loss
from torch_aclnn_ops.functional.preference import dpo_loss as dpo_loss
from torch_aclnn_ops.functional.preference import kto_loss as kto_loss
from torch_aclnn_ops.functional.preference import orpo_loss as orpo_loss
from torch_aclnn_ops.functional.preference import sequence_log_probs as sequence_log_probs
from torch_aclnn_ops.functional.preference import simpo_loss as simpo_loss

import torch as _torch

__all__ = sorted(name for name, value in globals().items() if not name.startswith("_") and not _inspect.ismodule(value))


def __dir__() -> list[str]:
    return __all__


if not _TYPE_CHECKING:
    __getattr__ = _raise_for_missing_names(__name__, _torch.nn.functional)
