"""Say what this installation can do: ``python -m torch_aclnn_ops.doctor``."""

import importlib.metadata
import platform
import sys

from torch_aclnn_ops import _torch_npu, ops
from torch_aclnn_ops._version import __version__
from torch_aclnn_ops.ops._raw_operator import NAMESPACE, RawOperator

import torch

__all__ = ["describe"]


def describe() -> str:
    """Describe versions, device, extension, and the path that each operator takes.

    Returns:
        Text of several lines, for people to read and to paste into a report.

    Example:
        >>> print(describe().splitlines()[0].split(":")[0])
        torch_aclnn_ops
    """
    operators = [getattr(ops, name) for name in ops.__all__]
    facts = {
        "torch_aclnn_ops": __version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_npu": _installed("torch_npu"),
        "NPU": _npu(),
        "extension": _extension(),
    }
    lines = [f"{name + ':':<17} {fact}" for name, fact in facts.items()]
    lines += ["", f"{'operator':<39} {'on cpu':<25} on npu"]
    lines += [f"{operator.name:<39} {_cpu_path(operator):<25} {_npu_path(operator)}" for operator in operators]
    return "\n".join(lines)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _npu() -> str:
    reason = _torch_npu.why_unavailable()
    if reason is not None:
        return f"none: {reason}"
    count = torch.accelerator.device_count()
    return f"{count} device(s)" if count else "none: torch_npu is imported, but it sees no device"


def _extension() -> str:
    if _has_npu_kernel(ops.mse_loss_backward):
        return "built and loaded"
    return "not built: this version has no C++ sources yet, so npu tensors take the formulas"


def _has_npu_kernel(operator: RawOperator) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{operator.name}", "PrivateUse1")


def _cpu_path(operator: RawOperator) -> str:
    return "native kernel of torch" if operator.has_cpu_kernel else "formula in torch calls"


def _npu_path(operator: RawOperator) -> str:
    return "CANN operator" if _has_npu_kernel(operator) else "formula in torch calls"


def main() -> int:
    """Print the description."""
    print(describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
