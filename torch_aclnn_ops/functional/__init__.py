"""Drop-ins for functions of :mod:`torch.nn.functional`, their autograd Functions, and the optimizer's step."""

from torch_aclnn_ops.functional.binary_cross_entropy import BinaryCrossEntropyFunction, binary_cross_entropy
from torch_aclnn_ops.functional.ema_adam import fused_ema_adam
from torch_aclnn_ops.functional.embedding import EmbeddingFunction, embedding
from torch_aclnn_ops.functional.linear_cross_entropy import LinearCrossEntropyOutput, linear_cross_entropy
from torch_aclnn_ops.functional.mse_loss import MSELossFunction, mse_loss

__all__ = [
    "BinaryCrossEntropyFunction",
    "EmbeddingFunction",
    "LinearCrossEntropyOutput",
    "MSELossFunction",
    "binary_cross_entropy",
    "embedding",
    "fused_ema_adam",
    "linear_cross_entropy",
    "mse_loss",
]
