"""The cross entropy of a linear layer's outputs, without the outputs.

``drop_in`` holds the public function, ``losses`` makes losses of the statistics of rows, ``statistics`` is their
autograd Function, ``gradients_in_forward`` that of a loss which is one number, ``rows`` the mathematics of some rows,
``vocab_parallel`` the statistics of a vocabulary that is spread over processes.
"""

from torch_aclnn_ops.functional.linear_cross_entropy.drop_in import linear_cross_entropy
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.functional.linear_cross_entropy.statistics import StatisticsFunction

__all__ = ["LinearCrossEntropyOutput", "StatisticsFunction", "linear_cross_entropy"]
