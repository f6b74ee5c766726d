"""The raw operators, ``torch.ops.torch_aclnn_ops.*``: arguments and results as CANN defines them, on every device.

What CANN's operator does not take on an NPU follows one rule:

* The functions of this module compute the formula in its place, on the NPU, and ``torch_aclnn_ops.explain`` says why.
* ``torch.ops.torch_aclnn_ops.*`` is CANN's operator itself, and raises: ``NotImplementedError`` on a chip without it,
  before anything is queued; ``RuntimeError`` with CANN's status and message for a dtype, a rank or a size.

Neither fails in the queue, which would stop it for good. Arguments that no device takes raise the same ``TypeError`` or
``ValueError`` everywhere.
"""

from torch_aclnn_ops.ops.binary_cross_entropy import binary_cross_entropy_backward
from torch_aclnn_ops.ops.ema_adam import apply_fused_ema_adam_
from torch_aclnn_ops.ops.embedding import embedding_dense_backward
from torch_aclnn_ops.ops.linear_cross_entropy import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
)
from torch_aclnn_ops.ops.mse_loss import mse_loss_backward

__all__ = [
    "apply_fused_ema_adam_",
    "binary_cross_entropy_backward",
    "embedding_dense_backward",
    "fused_cross_entropy_loss_with_max_sum",
    "fused_linear_cross_entropy_loss_grad",
    "fused_linear_online_max_sum",
    "mse_loss_backward",
]
