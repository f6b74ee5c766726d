"""Settings that every test runs under."""

import os

# torch_npu cannot be imported without CANN, and `import torch` would try to, here and in programs that the tests run.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import pytest
import torch

# Threads that wait for one another cost tiny tensors ten times their work on a busy machine.
torch.set_num_threads(1)

# Programs that the tests run, and helpers that load the host NPU's libraries.
collect_ignore = [
    "_aclnn.py",
    "_rules.py",
    "_rules_of_attention.py",
    "_runtime.py",
    "clients",
    "op_db.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files first whose tests take longest, so that no core waits for another at the end."""
    longest = ("test_on_npu.py", "test_enable.py", "test_c_interface.py")
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
