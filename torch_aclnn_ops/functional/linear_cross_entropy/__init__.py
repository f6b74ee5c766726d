"""The cross entropy of a linear layer's outputs, without the outputs.

``drop_in`` holds the public function, ``function`` the autograd Functions, ``rows`` the mathematics of a chunk of rows.
"""

from torch_aclnn_ops.functional.linear_cross_entropy.drop_in import linear_cross_entropy
from torch_aclnn_ops.functional.linear_cross_entropy.function import LinearCrossEntropyFunction

__all__ = ["LinearCrossEntropyFunction", "linear_cross_entropy"]
