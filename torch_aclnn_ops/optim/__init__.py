"""The optimizer: Adam with an average of the weights, and its checkpoints in other layouts."""

from torch_aclnn_ops.optim._checkpoints import to_mindspeed_state_dict
from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam

__all__ = ["FusedEmaAdam", "to_mindspeed_state_dict"]
