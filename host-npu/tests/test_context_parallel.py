"""Attention of DTensors, and of a sequence that ranks share, by torch_npu's own kernels on two simulated NPUs."""

import pytest
import torch
from host_npu import testing

from tests import _context_parallel as programs


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dim", [0, 1], ids=["batches", "heads"])
def test_attention_of_dtensors_is_that_of_float64(dim, is_causal):
    errors = testing.run(programs.of_dtensors, 2, dim, is_causal, device="npu")
    assert max(errors) < 2e-6


_MODULES = {
    "torch's": "torch.distributed.tensor.experimental._attention",
    "torch_npu's": "torch_npu.distributed.tensor.experimental._context_parallel",
}


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch_npu 2.9 has no context_parallel")
@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="torch_npu 2.14's raises a TypeError of its own")
@pytest.mark.parametrize("module", _MODULES.values(), ids=_MODULES)
def test_a_context_parallel_sequence_has_the_attention_of_float64(module):
    errors = testing.run(programs.of_a_shared_sequence, 2, module, device="npu")
    assert max(errors) < 2e-6
