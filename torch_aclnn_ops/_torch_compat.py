"""Every private or version-dependent name of torch that the package uses; no other module has one.

Each entry says which versions of torch it serves, and what happens without it.
"""

import torch

__all__ = ["cpu_capability"]


def cpu_capability() -> str:
    """Return the vector instructions that torch's own kernels use here, such as ``"AVX2"``; all versions have it."""
    return torch.backends.cpu.get_cpu_capability()
