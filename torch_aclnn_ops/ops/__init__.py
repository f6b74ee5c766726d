"""The raw operators, ``torch.ops.torch_aclnn_ops.*``, with CANN's arguments and results on every device.

On an NPU, ``torch_aclnn_ops.ops.*`` and ``torch.ops.torch_aclnn_ops.*`` always launch CANN's operator. They raise for
unsupported arguments before anything is queued, because a failure in torch_npu's task queue stops it permanently:

* ``NotImplementedError`` on a chip without the operator.
* ``RuntimeError`` with CANN's status and message for an unsupported dtype, rank or size.
* ``TypeError``, ``ValueError`` or ``IndexError``, the same on every device, for arguments that are invalid everywhere.

The drop-in functions fall back to PyTorch in the first two cases, and ``torch_aclnn_ops.explain`` shows the reason.
"""

from torch_aclnn_ops._autograd.raw_operator import RawOperator as _RawOperator
from torch_aclnn_ops.ops.binary_cross_entropy import binary_cross_entropy_backward as binary_cross_entropy_backward
from torch_aclnn_ops.ops.ema_adam import apply_fused_ema_adam_ as apply_fused_ema_adam_
from torch_aclnn_ops.ops.embedding import embedding_dense_backward as embedding_dense_backward
from torch_aclnn_ops.ops.linear_cross_entropy import (
    fused_cross_entropy_loss_with_max_sum as fused_cross_entropy_loss_with_max_sum,
)
from torch_aclnn_ops.ops.linear_cross_entropy import (
    fused_linear_cross_entropy_loss_grad as fused_linear_cross_entropy_loss_grad,
)
from torch_aclnn_ops.ops.linear_cross_entropy import fused_linear_online_max_sum as fused_linear_online_max_sum
from torch_aclnn_ops.ops.mse_loss import mse_loss_backward as mse_loss_backward

__all__ = sorted(name for name, value in globals().items() if isinstance(value, _RawOperator))


def __dir__() -> list[str]:
    return __all__
