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


_VERSION = ".".join(torch.__version__.split(".")[:2])
# What docs/limits.md says of torch_npu's own function.
_RAISES = {
    "2.9": "No module named 'torch_npu.distributed.tensor.experimental'",
    "2.14": r"TypeError: _npu_fa_v3_cp_strategy\(\)",
}


@pytest.mark.skipif(_VERSION in _RAISES, reason="context_parallel raises")
@pytest.mark.parametrize("module", _MODULES.values(), ids=_MODULES)
def test_a_context_parallel_sequence_has_the_attention_of_float64(module):
    errors = testing.run(programs.of_a_shared_sequence, 2, module, device="npu")
    assert max(errors) < 2e-6


@pytest.mark.skipif(_VERSION not in _RAISES, reason="context_parallel works")
def test_context_parallel_raises_with_the_versions_of_the_page():
    with pytest.raises(AssertionError, match=_RAISES[_VERSION]):
        testing.run(programs.of_a_shared_sequence, 2, _MODULES["torch_npu's"], device="npu")
