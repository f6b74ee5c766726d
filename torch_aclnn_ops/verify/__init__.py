"""Verify this machine: every operator, its errors and the optimizer are compared with the CPU.

``python -m torch_aclnn_ops.verify`` runs on an NPU in less than five minutes, and prints a table. Without an NPU,
``python -m host_npu -m torch_aclnn_ops.verify`` runs on a simulated one, and ``--device cpu`` on the CPU. The exit
status is 0 if all checks pass.
"""

from torch_aclnn_ops.verify._command import main
from torch_aclnn_ops.verify._outcomes import Outcome, verify

__all__ = ["Outcome", "main", "verify"]


def __dir__() -> list[str]:
    return __all__
