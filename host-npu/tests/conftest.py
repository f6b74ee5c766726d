"""Settings for all tests."""

import os

# torch_npu cannot be imported without CANN, and `import torch` would import it, here and in programs that tests run.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import pytest
import torch

# On a busy machine, synchronizing threads costs ten times the work on tiny tensors.
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
    """Run the files with the slowest tests first, so that all cores finish together."""
    longest = ("test_on_npu.py", "test_enable.py", "test_c_interface.py")
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
