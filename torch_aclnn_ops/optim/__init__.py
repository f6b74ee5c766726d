"""``FusedEmaAdam``, conversion of its checkpoints, and access to it inside wrappers."""

from torch_aclnn_ops.optim._checkpoints import to_mindspeed_state_dict
from torch_aclnn_ops.optim._wrappers import unwrap
from torch_aclnn_ops.optim.fused_ema_adam import FusedEmaAdam

__all__ = ["FusedEmaAdam", "to_mindspeed_state_dict", "unwrap"]


def __dir__() -> list[str]:
    return __all__
