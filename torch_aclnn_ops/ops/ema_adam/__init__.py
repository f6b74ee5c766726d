"""A step of Adam, and of an average of the weights: the operator, and the kernels that apply it to lists."""

from torch_aclnn_ops.ops.ema_adam.apply import apply_fused_ema_adam_

__all__ = ["apply_fused_ema_adam_"]
