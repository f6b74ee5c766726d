"""The tests in this folder need an NPU: ``make test-npu`` runs them on a device, or else on the host NPU.

A test that calls functions of the host NPU (``host_npu.fail``, ``host_npu.stats`` ...) has the marker ``simulator``: on
a device it is skipped.
"""

import os

# The formulas are also tested in float64, which PyTorch's products refuse on a device.
os.environ.setdefault("HOST_NPU_DTYPES", "torch")

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from functools import partial

import host_npu
import pytest
import torch

if not hasattr(torch, "npu"):
    collect_ignore_glob = ["test_*.py"]
else:
    # By default, older chips compile torch's operators as graphs, which the host NPU does not simulate.
    torch.npu.set_compile_mode(jit_compile=False)

_stats = host_npu.stats


def _refuse(name: str, *_: object, **__: object) -> None:
    raise AssertionError(f"host_npu.{name} needs @pytest.mark.simulator: a device does not have it")


def _needs_simulator(item: pytest.Item) -> bool:
    return item.get_closest_marker("simulator") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need what a device lacks."""
    if _needs_simulator(item) and not host_npu.is_enabled():
        pytest.skip("needs functions of the host NPU")


@pytest.fixture(autouse=True)
def _only_marked_tests_use_the_simulator(request, monkeypatch):
    if _needs_simulator(request.node):
        return
    for name in ("count_calls", "fail", "reset", "stats"):
        monkeypatch.setattr(host_npu, name, partial(_refuse, name))
    imported = [name for name, value in vars(request.module).items() if _is_of_simulator(value)]
    assert not imported, f"{imported} of host_npu need @pytest.mark.simulator"


def _is_of_simulator(value: object) -> bool:
    return callable(value) and (getattr(value, "__module__", None) or "").startswith("host_npu")


def _alive() -> dict[str, int]:
    alive = _stats().alive
    return {kind: alive.get(kind, 0) for kind in ("aclTensor", "aclOpExecutor")}


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    """Check that a test leaves an empty stream, and no more live aclTensors and executors than before."""
    torch.npu.synchronize()
    before = _alive() if host_npu.is_enabled() else {}
    yield
    torch.npu.synchronize()
    if host_npu.is_enabled():
        assert _alive() == before
        assert not _stats().pending_failures
