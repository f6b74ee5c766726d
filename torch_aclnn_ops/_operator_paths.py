"""Which implementation each operator uses in this installation, for the doctor."""

from torch_aclnn_ops import _cpu_extension, _extension, ops
from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._switch import is_disabled

import torch

_FALLBACK = "PyTorch fallback"


def operator_paths() -> dict[str, dict[str, str]]:
    """Return which implementation each raw operator, and each function composed of several, uses per device type."""
    operators = [getattr(ops, name) for name in ops.__all__]
    paths = {operator.name: {"cpu": _on_cpu(operator), "npu": _on_npu(operator)} for operator in operators}
    has_kernels = _cpu_extension.why_unavailable() is None
    on_npu = paths[ops.fused_linear_online_max_sum.name]["npu"]
    if not on_npu.startswith(_FALLBACK):
        on_npu = "CANN's fused operators for 16-bit inputs without options, else PyTorch fallback in chunks of rows"
    in_chunks = f"{f'compiled CPU kernels, {_FALLBACK} in float64' if has_kernels else _FALLBACK}, in chunks of rows"
    adam = paths[ops.apply_fused_ema_adam_.name]["npu"]
    if is_disabled():
        on_npu, adam = f"{_FALLBACK} in chunks of rows", _FALLBACK
        in_chunks, on_npu = (f"PyTorch's function; for arguments that it lacks, {path}" for path in (in_chunks, on_npu))
    return {
        **paths,
        "functional.linear_cross_entropy": {"cpu": in_chunks, "npu": on_npu},
        "optim.FusedEmaAdam": {"cpu": f"native PyTorch kernels for float32 and float64, else {_FALLBACK}", "npu": adam},
    }


def is_on_this_chip(operator: RawOperator) -> bool:
    """Return whether CANN supports an operator on the chip of this machine."""
    return _extension.why_unavailable() is None and None in _why_not(operator)


def _why_not(operator: RawOperator) -> list[str | None]:
    # An operator supports at least one of these dtypes, if any.
    return list(map(operator.why_not_dtype, (torch.float16, torch.float32)))


def _on_cpu(operator: RawOperator) -> str:
    return "native PyTorch kernel" if operator.has_cpu_kernel else _FALLBACK


def _on_npu(operator: RawOperator) -> str:
    if _extension.why_unavailable() is not None:
        return _FALLBACK
    reasons = _why_not(operator)
    return operator.cann if None in reasons else f"{_FALLBACK}: {reasons[-1]}"
