"""Load the compiled part ``torch_aclnn_ops._cpu``, and know why it is not used where it is not."""

import functools
import importlib.util

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["why_unavailable"]


@functools.cache
def why_unavailable() -> str | None:
    """Load the compiled part at the first call; return why it is not used, or ``None`` if it is."""
    chip = torch.cpu.get_capabilities()
    if not chip.get("avx512_bf16"):
        return "the CPU has no AVX512-BF16"
    if chip.get("amx_bf16"):
        return "the CPU has AMX, with which it is not tested"
    if not torch.backends.mkldnn.is_available():
        return "torch has no oneDNN"
    spec = importlib.util.find_spec("torch_aclnn_ops._cpu")
    if spec is None or spec.origin is None:
        return "it was not built: reinstall with pip's --no-build-isolation where torch is installed"
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        return f"it was built for another torch, and has to be rebuilt: {error}"
    return _why_refused()


def _why_refused() -> str | None:
    """Return why a kernel cannot be called: it is missing, or oneDNN refuses, as its environment variables may say."""
    try:
        with _disable_current_modes():  # the first call may be one with fake tensors
            kernels = torch.ops.torch_aclnn_ops
            logits, target = torch.zeros(1, 1, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
            for dtype in (torch.bfloat16, torch.float32):
                factor = torch.zeros(1, 2, dtype=dtype, device="cpu")
                kernels.linear_cross_entropy_logits(factor, factor, logits)
            kernels.linear_cross_entropy_softmax(logits, logits[0])
            kernels.linear_cross_entropy_logits_gradient(logits, target, logits[0], logits[0], None, logits)
    except AttributeError as error:
        return f"it was built from other sources, and has to be rebuilt: {error}"
    except RuntimeError as error:
        return f"oneDNN refuses its products: {str(error).splitlines()[0]}"
    return None
