"""Is everything right on this machine? Each operator, its refusals and the optimizer, compared with the CPU.

``python -m torch_aclnn_ops.verify`` runs on an NPU, in less than five minutes, and prints one table. On a machine
without one, ``python -m host_npu -m torch_aclnn_ops.verify`` runs it on a simulated NPU, and ``--device cpu`` on the
CPU. The exit status is 0 if every result is right.
"""

from torch_aclnn_ops.verify._command import main
from torch_aclnn_ops.verify._outcomes import Outcome, verify

__all__ = ["Outcome", "main", "verify"]


def __dir__() -> list[str]:
    return __all__
