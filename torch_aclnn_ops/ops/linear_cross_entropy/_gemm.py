"""Matrix products on a CPU that torch has, but does not make with torch.mm."""

import functools

from torch_aclnn_ops import _cpu_extension

import torch
from torch import Tensor

# Kernels are made for each new shape, in about 2 ms, in which other products do about 2^28 more multiplications. A call
# has up to six shapes, which are new where the number of ignored rows is.
_FEWEST_MULTIPLICATIONS = 2**32


def prefers_onednn(weight: Tensor, dtype: torch.dtype, rows: int) -> bool:
    """Return whether the gradients of rows and of a head are to be made by :func:`linear`.

    torch.mm multiplies float32 numbers with MKL, which runs at less than half the speed of an AMD chip with AVX-512.
    oneDNN runs at full speed there. torch takes it for float32 only where less precision is allowed, or through the
    operator that compiled code calls for a linear layer.

    Args:
        weight: the head, shape (V, H).
        dtype: that the products are computed in.
        rows: their number.
    """
    return dtype == torch.float32 and _is_worth_a_kernel(weight, rows) and _is_onednn_faster()


def how(weight: Tensor, dtype: torch.dtype, rows: int) -> str:
    """Say for a log what is not computed by torch.mm and torch.softmax.

    Args:
        weight: the head, shape (V, H).
        dtype: that the products are computed in.
        rows: their number.
    """
    kernel = any(has_logits_kernel(weight, factors, rows) for factors in {weight.dtype, dtype})
    return ("; logits and softmax by torch_aclnn_ops._cpu" if kernel else "") + (
        "; float32 products by oneDNN" if prefers_onednn(weight, dtype, rows) else ""
    )


def linear(input: Tensor, weight: Tensor) -> Tensor:
    """Return ``input @ weight.T`` of float32 tensors, by oneDNN.

    Args:
        input: shape (M, K); copied if it is not contiguous.
        weight: shape (N, K), of which one dimension is contiguous and the other dense.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], "")
    return product


def has_logits_kernel(weight: Tensor, dtype: torch.dtype, rows: int) -> bool:
    """Return whether the logits of rows are to be made by :mod:`._compiled`.

    Args:
        weight: the head, shape (V, H).
        dtype: that its numbers have in the product.
        rows: their number.
    """
    is_taken = prefers_onednn(weight, dtype, rows)
    if dtype == torch.bfloat16:
        is_taken = weight.shape[1] % 2 == 0 and _is_worth_a_kernel(weight, rows)
    return is_taken and _cpu_extension.why_unavailable() is None


def _is_worth_a_kernel(weight: Tensor, rows: int) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.is_contiguous()
        and rows * weight.numel() >= _FEWEST_MULTIPLICATIONS
        and bool(torch.backends.mkldnn.enabled)
    )


@functools.cache
def _is_onednn_faster() -> bool:
    """Return whether the chip is one on which oneDNN's products are faster, and torch has them."""
    chip = torch.cpu.get_capabilities()
    is_amd = str(chip.get("cpu_name", "")).startswith("AMD")
    return is_amd and bool(chip.get("avx512_f")) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
