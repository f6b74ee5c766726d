"""Every private or version-dependent name of torch that the package uses; no other module has one.

Each entry says which versions of torch it serves, and what happens without it.
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = ["cpu_capability", "disable_current_modes", "has_bfloat16_units"]


def cpu_capability() -> str:
    """Return the vector instructions that torch's own kernels use here, such as ``"AVX2"``; all versions have it."""
    return torch.backends.cpu.get_cpu_capability()


def has_bfloat16_units() -> bool:
    """Return whether the CPU has units for bfloat16 products, and torch uses them; all versions have these names."""
    if cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):  # asked for by ATEN_CPU_CAPABILITY, maybe
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
