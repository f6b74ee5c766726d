"""The optimizer: Adam with an average of the weights, its checkpoints in other layouts, and wrappers of others."""

from torch_aclnn_ops.optim._checkpoints import to_mindspeed_state_dict
from torch_aclnn_ops.optim._wrappers import unwrap
from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam

__all__ = ["FusedEmaAdam", "to_mindspeed_state_dict", "unwrap"]


def __dir__() -> list[str]:
    return __all__
