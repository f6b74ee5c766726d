"""Say what this installation can do: ``python -m torch_aclnn_ops.doctor``."""

import importlib.metadata
import platform
import sys

from torch_aclnn_ops import _cpu_extension, _extension, _torch_npu, ops
from torch_aclnn_ops._version import __version__
from torch_aclnn_ops.ops._paths import CANN_NAMES
from torch_aclnn_ops.ops._raw_operator import RawOperator

import torch

__all__ = ["describe"]


def describe() -> str:
    """Describe versions, device, extensions, and the path that each operator takes.

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
        "extension": _state(_extension.why_unavailable()),
        "CPU extension": _state(_cpu_extension.why_unavailable()),
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
    if reason is not None and "torch_npu" not in sys.modules:
        return f"none: {reason}"
    count = torch.accelerator.device_count()
    if not count:
        return "none: torch_npu is imported, but it sees no device"
    return f"{count} device(s), {_extension.soc() or 'of a chip that is not known'}"


def _state(reason: str | None) -> str:
    return "loaded" if reason is None else f"not loaded: {reason}"


def _cpu_path(operator: RawOperator) -> str:
    return "native kernel of torch" if operator.has_cpu_kernel else "formula in torch calls"


def _npu_path(operator: RawOperator) -> str:
    if _extension.why_unavailable() is not None:
        return "formula in torch calls"
    missing = _extension.missing_operators().get(operator.name)
    return CANN_NAMES[operator.name] if missing is None else f"formula in torch calls: {missing}"


def main() -> int:
    """Print the description."""
    print(describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
