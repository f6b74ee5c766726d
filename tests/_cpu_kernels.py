"""Whether the bfloat16 kernel of csrc/cpu has to be there: by what the machine has, not by what was built or loaded."""

from torch_aclnn_ops._cpu_extension import has_bfloat16_units

import pytest

HAS_UNITS = has_bfloat16_units()

needs_units = pytest.mark.skipif(not HAS_UNITS, reason="needs a CPU with units for bfloat16 (AVX512-BF16 or AMX)")
