"""The tests in this folder need an NPU: ``python -m host_npu -m pytest tests/npu`` simulates one."""

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import host_npu
import pytest
import torch

if not hasattr(torch, "npu"):
    collect_ignore_glob = ["test_*.py"]
else:
    # Older chips compile torch's operators as graphs unless told not to, which the host NPU does not simulate.
    torch.npu.set_compile_mode(jit_compile=False)


def _alive() -> dict[str, int]:
    alive = host_npu.stats().alive
    return {kind: alive.get(kind, 0) for kind in ("aclTensor", "aclOpExecutor")}


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    """Every test ends with an empty stream, and with no more aclTensors and executors alive than at its start."""
    torch.npu.synchronize()
    before = _alive() if host_npu.is_enabled() else {}
    yield
    torch.npu.synchronize()
    if host_npu.is_enabled():
        assert _alive() == before
        assert not host_npu.stats().pending_failures
