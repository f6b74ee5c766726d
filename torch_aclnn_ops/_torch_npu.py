"""Import torch and, where it can work, torch_npu.

torch imports torch_npu by itself when it is installed, and torch_npu cannot be loaded without CANN's libraries; then
even ``import torch`` fails. This module looks for CANN first, and keeps torch from loading a torch_npu that cannot
work.
"""

import ctypes
import importlib.util
import os
import sys

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

# What libtorch_npu.so is linked with, in the order in which CANN's libraries need one another.
_CANN_LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
)


def why_unavailable() -> str | None:
    """Return why tensors cannot be on an NPU in this process, or ``None`` if torch_npu is imported."""
    return _reason


def _why_not_loadable() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    for library in _CANN_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return f"torch_npu is installed, but CANN is not: {error}"
    return None


def _import_torch() -> str | None:
    """Import torch, and torch_npu unless it cannot be loaded or is switched off; return why it is not imported."""
    if "torch_npu" in sys.modules:
        return None
    reason = _why_not_loadable()
    if reason is None and os.environ.get(_AUTOLOAD) == "0":
        reason = f"torch_npu is installed and CANN found, but {_AUTOLOAD}=0 keeps torch_npu from being loaded"
    previous = os.environ.get(_AUTOLOAD)
    try:
        if reason is not None:
            os.environ[_AUTOLOAD] = "0"
        import torch  # noqa: F401
    finally:
        if previous is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = previous
    if reason is None and "torch_npu" not in sys.modules:
        return "torch was imported without torch_npu before torch_aclnn_ops; import torch_npu first to use an NPU"
    return reason


_reason = _import_torch()
