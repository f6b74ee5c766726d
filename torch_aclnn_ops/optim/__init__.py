"""``FusedEmaAdam``, conversion of its checkpoints, and access to it inside wrappers."""

from typing import TYPE_CHECKING

from torch_aclnn_ops._checks import raise_for_missing_names
from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam
from torch_aclnn_ops.optim.other_libraries import to_mindspeed_state_dict, unwrap

import torch

__all__ = ["FusedEmaAdam", "to_mindspeed_state_dict", "unwrap"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:
    __getattr__ = raise_for_missing_names(__name__, torch.optim)
