"""What the operators of the linear cross entropy share: chunks of rows and the bit-packed mask of rows."""

from collections.abc import Iterator

from torch_aclnn_ops.ops._limits import why_not_chip

import torch
from torch import Tensor

# Logits held at a time: 32 MiB in float32, enough rows for matrix products at full speed.
_LOGITS_AT_A_TIME = 2**23


# Limits of the kernels, some of which CANN's checks leave to a failure inside of them.
_MIN_CLASSES = 128
_MAX_FEATURES = 65534


def linear_limits(soc: str, input: Tensor, weight: Tensor, *_: object) -> str | None:
    """Return what the operators that multiply input and weight do not take of them on an NPU, or ``None``."""
    reason = why_not_chip(soc, "Ascend910B", "Ascend910_93")
    if reason is not None:
        return reason
    for name, tensor in (("input", input), ("weight", weight)):
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            return f"{name} is {tensor.dtype} and CANN's operator takes torch.float16 and torch.bfloat16"
    if weight.dim() != 2 or input.dim() != 2:
        return "CANN's operator takes matrices"
    classes, features = weight.shape
    if classes < _MIN_CLASSES:
        return f"weight has {classes} classes and CANN's operator takes {_MIN_CLASSES} or more"
    if features > _MAX_FEATURES:
        return f"weight has {features} features and CANN's operator takes at most {_MAX_FEATURES}"
    return None


def row_chunks(rows: int, classes: int, size: int | None = None) -> Iterator[slice]:
    """Cut rows into chunks of ``size``, by default so that a chunk's logits stay small.

    The default size is a multiple of 8, so that all chunks but the last fill the bytes of a packed mask.
    """
    if size is None:
        size = max(_LOGITS_AT_A_TIME // max(classes, 1) // 8 * 8, 8)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean vector into bytes, least significant bit first; its length must be a multiple of 8."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (mask.reshape(-1, 8).to(torch.uint8) << places).sum(1, dtype=torch.uint8)


def unpack_mask(target_mask: Tensor, rows: int) -> Tensor:
    """Return one boolean a row from a packed mask, or the mask itself if it is boolean."""
    if target_mask.dtype == torch.bool:
        return target_mask
    places = torch.arange(8, dtype=torch.uint8, device=target_mask.device)
    return ((target_mask.unsqueeze(1) >> places) & 1).reshape(-1)[:rows].bool()
