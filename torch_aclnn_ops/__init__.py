"""Seven CANN operators as PyTorch losses, an embedding and an optimizer, for Ascend NPUs and for CPUs."""

from torch_aclnn_ops import _torch_npu as _torch_npu  # isort: skip  (before anything imports torch)
from torch_aclnn_ops import _torch_compat as _torch_compat  # isort: skip  (refuses a torch that does not fit)
from torch_aclnn_ops import _extension, functional, nn, ops, optim
from torch_aclnn_ops._call_log import Report, explain, report
from torch_aclnn_ops._extension import check_values, launches
from torch_aclnn_ops._patch import patch
from torch_aclnn_ops._switch import disabled
from torch_aclnn_ops._version import __version__

__all__ = [
    "Report",
    "__version__",
    "check_values",
    "disabled",
    "explain",
    "functional",
    "launches",
    "nn",
    "ops",
    "optim",
    "patch",
    "report",
]


def __dir__() -> list[str]:
    return __all__


_extension.load()
_torch_npu.call_after_import(_extension.load)
