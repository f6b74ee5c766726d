"""Which path a call on an NPU takes: CANN's operator where it takes the arguments, else the formula on the device.

A path says so in the log ``torch_aclnn_ops`` at level DEBUG, and to :func:`torch_aclnn_ops.explain`.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._torch_compat import dispatch_has_kernel_for_dispatch_key

import torch
from torch import Tensor

_log = logging.getLogger("torch_aclnn_ops")
_recorder: list[tuple[str, str]] | None = None

CANN_NAMES = {
    "mse_loss_backward": "aclnnMseLossBackward",
    "binary_cross_entropy_backward": "aclnnBinaryCrossEntropyBackward",
    "embedding_dense_backward": "aclnnEmbeddingDenseBackward",
    "fused_linear_online_max_sum": "aclnnFusedLinearOnlineMaxSum",
    "fused_cross_entropy_loss_with_max_sum": "aclnnFusedCrossEntropyLossWithMaxSum",
    "fused_linear_cross_entropy_loss_grad": "aclnnFusedLinearCrossEntropyLossGrad",
    "apply_fused_ema_adam_": "aclnnApplyFusedEmaAdam",
}

_MAX_RANK = 8
_WITHOUT_BFLOAT16 = ("Ascend910", "Ascend310P")
_16_BIT = (torch.float16, torch.bfloat16)

# Limits of the kernels of the linear cross entropy, some of which CANN's checks leave to a failure inside of them.
_MIN_CLASSES = 128
_MAX_FEATURES = 65534
_MAX_CLASSES_OF_SOFTMAX = 24560
_MAX_ROWS_OF_SOFTMAX = 65535


def why_formula(operator: str, arguments: dict[str, Any]) -> str | None:
    """Return why an operator's formula computes these arguments, or ``None`` if its kernel for the device does.

    Arguments that no device takes are not told from those that CANN does not take: the formula's path refuses them with
    the same words as every other path.
    """
    first = next(iter(arguments.values()))
    if not isinstance(first, Tensor) or first.device.type != "npu":
        return None
    reason = why_not_cann(operator, arguments)
    note(operator, CANN_NAMES[operator] if reason is None else f"formula in torch calls, because {reason}")
    return reason


def note_kernel(operator: str, arguments: dict[str, Any]) -> None:
    """Note the kernel that the dispatcher has chosen, where paths are recorded."""
    if _recorder is None:
        return
    device = next(iter(arguments.values())).device.type
    if device == "npu":
        note(operator, CANN_NAMES[operator])
        return
    native = device == "cpu" and dispatch_has_kernel_for_dispatch_key(f"torch_aclnn_ops::{operator}", "CPU")
    kernel = "native kernel of torch" if native else "formula in torch calls"
    note(operator, f"{kernel}, because the tensors are on {device}")


def why_formula_of_forward(function: str, **tensors: Tensor | None) -> str | None:
    """Return why torch_npu's kernel of a loss does not take these tensors, or ``None`` if it does, as on a CPU."""
    soc = _extension.soc()
    if soc is None or next(iter(tensors.values())).device.type != "npu":  # type: ignore[union-attr]
        return None
    reason = _why_not_rank(tensors) or _why_not_dtype(soc, **tensors)
    if reason is not None:
        note(function, f"formula in torch calls, because {reason}")
    return reason


def note(operator: str, path: str) -> None:
    """Log a path, and tell it to :func:`recording`; compiled code says nothing, as it is traced once."""
    if torch.compiler.is_compiling():
        return
    _log.debug("%s: %s", operator, path)
    if _recorder is not None and (operator, path) not in _recorder:
        _recorder.append((operator, path))


def log_path(function: str, describe: Callable[[], str]) -> None:
    """Tell the path of a call, which ``describe`` puts in words; compiled code says nothing, as it is traced once."""
    if torch.compiler.is_compiling() or (_recorder is None and not _log.isEnabledFor(logging.DEBUG)):
        return
    note(function, describe())


@contextmanager
def recording() -> Iterator[list[tuple[str, str]]]:
    """Collect the paths of the calls inside."""
    global _recorder
    outer, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = outer


def why_not_cann(operator: str, arguments: dict[str, Any]) -> str | None:
    """Return why CANN's operator does not take arguments that are on an NPU, or ``None`` if it does."""
    if _extension.why_unavailable() is not None and _extension.load() is not None:
        return f"the extension is not loaded: {_extension.why_unavailable()}"
    if operator in _extension.missing_operators():
        return _extension.missing_operators()[operator]
    soc = _extension.soc()
    if soc is None:
        return None  # a chip newer than this package: CANN shall decide
    return _why_not_rank(arguments) or _LIMITS[operator](soc, **arguments)


def _why_not_rank(arguments: dict[str, Any]) -> str | None:
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and tensor.dim() > _MAX_RANK:
            return f"{name} has {tensor.dim()} dimensions and CANN's operators take at most {_MAX_RANK}"
    return None


def _why_not_dtype(soc: str, **tensors: Tensor | None) -> str | None:
    for name, tensor in tensors.items():
        if tensor is None or tensor.dtype in (torch.float32, torch.float16):
            continue
        if tensor.dtype != torch.bfloat16 or soc in _WITHOUT_BFLOAT16:
            return f"{name} is {tensor.dtype}, which CANN's operator does not take on {soc}"
    return None


def _loss(
    soc: str, grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None = None, **_: Any
) -> str | None:
    return _why_not_dtype(soc, grad_output=grad_output, self=self, target=target, weight=weight)


def _embedding(soc: str, grad_output: Tensor, **_: Any) -> str | None:
    if soc == "Ascend310P":
        return f"CANN's operator is not supported on {soc}"
    return _why_not_dtype(soc, grad_output=grad_output)


def _linear(soc: str, input: Tensor, weight: Tensor, softmax: Tensor | None = None, **_: Any) -> str | None:
    if soc not in ("Ascend910B", "Ascend910_93"):
        return f"CANN's operator is not supported on {soc}"
    for name, tensor in (("input", input), ("weight", weight)):
        if tensor.dtype not in _16_BIT:
            return f"{name} is {tensor.dtype} and CANN's operator takes torch.float16 and torch.bfloat16"
    if weight.dim() != 2 or input.dim() != 2:
        return "CANN's operator takes matrices"
    classes, features = weight.shape
    if classes < _MIN_CLASSES:
        return f"weight has {classes} classes and CANN's operator takes {_MIN_CLASSES} or more"
    if features > _MAX_FEATURES:
        return f"weight has {features} features and CANN's operator takes at most {_MAX_FEATURES}"
    if softmax is not None and (classes > _MAX_CLASSES_OF_SOFTMAX or input.shape[0] > _MAX_ROWS_OF_SOFTMAX):
        return (
            f"softmax has shape {list(softmax.shape)} and CANN's operator takes at most"
            f" {[_MAX_ROWS_OF_SOFTMAX, _MAX_CLASSES_OF_SOFTMAX]}"
        )
    return None


def _loss_of_sums(soc: str, logits_max: Tensor, **_: Any) -> str | None:
    if soc not in ("Ascend910B", "Ascend910_93", "Ascend950"):
        return f"CANN's operator is not supported on {soc}"
    if logits_max.dtype != torch.float32:
        return f"logits_max is {logits_max.dtype} and CANN's operator takes torch.float32"
    return None


def _adam(soc: str, grad: Tensor, **_: Any) -> str | None:
    if soc not in ("Ascend910B", "Ascend910_93", "Ascend950"):
        return f"CANN's operator is not supported on {soc}"
    return _why_not_dtype(soc, grad=grad)


_LIMITS: dict[str, Callable[..., str | None]] = {
    "mse_loss_backward": _loss,
    "binary_cross_entropy_backward": _loss,
    "embedding_dense_backward": _embedding,
    "fused_linear_online_max_sum": _linear,
    "fused_cross_entropy_loss_with_max_sum": _loss_of_sums,
    "fused_linear_cross_entropy_loss_grad": _linear,
    "apply_fused_ema_adam_": _adam,
}
