"""The fused Adam step with weight averaging: the raw operator, and kernels that apply it to lists of tensors."""

from torch_aclnn_ops.ops.ema_adam.apply import apply_fused_ema_adam_

__all__ = ["apply_fused_ema_adam_"]
