"""Drop-ins for functions of :mod:`torch.nn.functional`, and the ``autograd.Function`` classes behind them."""

from torch_aclnn_ops.functional.binary_cross_entropy import BinaryCrossEntropyFunction, binary_cross_entropy
from torch_aclnn_ops.functional.embedding import EmbeddingFunction, embedding
from torch_aclnn_ops.functional.linear_cross_entropy import LinearCrossEntropyFunction, linear_cross_entropy
from torch_aclnn_ops.functional.mse_loss import MSELossFunction, mse_loss

__all__ = [
    "BinaryCrossEntropyFunction",
    "EmbeddingFunction",
    "LinearCrossEntropyFunction",
    "MSELossFunction",
    "binary_cross_entropy",
    "embedding",
    "linear_cross_entropy",
    "mse_loss",
]
