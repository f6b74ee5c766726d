"""Whether the kernels of csrc/cpu have to be there: by what the machine has, not by what was built or loaded."""

import pytest
import torch

_CHIP = torch.cpu.get_capabilities()
HAS_KERNELS = bool(_CHIP.get("avx512_bf16")) and not _CHIP.get("amx_bf16")

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="csrc/cpu needs a CPU with AVX512-BF16 and without AMX")
