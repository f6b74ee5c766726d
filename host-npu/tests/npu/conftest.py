"""The tests in this folder need an NPU: ``python -m host_npu --devices 2 -m pytest tests/npu``."""

import re
from collections.abc import Iterator

import pytest
import torch

if not hasattr(torch, "npu"):
    collect_ignore_glob = ["test_*.py"]

# torch_npu's operators: "has no attribute" from Python, "Unknown keyword argument" from TorchScript's schemas. CANN's
# operators, which exist only if torch_npu looks them up: "undefined symbol" from ctypes.
_IS_MISSING = re.compile(
    r"(module 'torch_npu'|'npu' object) has no attribute 'npu_|npu::npu_\w+\(\) .*[Uu]nknown keyword argument|"
    r"undefined symbol: aclnn"
)


@pytest.fixture
def private_formats() -> Iterator[None]:
    """Let ``npu_format_cast`` keep tensors in a private format."""
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.fixture
def jit_compile(request) -> Iterator[None]:
    """Set the compile mode, True without a parameter."""
    torch.npu.set_compile_mode(jit_compile=getattr(request, "param", True))
    # Each thread has its own mode: a separate backward thread would keep the mode of its first pass.
    with torch.autograd.set_multithreading_enabled(False):
        yield
    torch.npu.set_compile_mode(jit_compile=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip tests of operators that an older torch_npu lacks."""
    try:
        return (yield)
    except (AttributeError, RuntimeError, TypeError) as error:
        if _IS_MISSING.search(str(error)) and not torch.__version__.startswith("2.13."):
            pytest.skip(f"torch {torch.__version__}: {str(error).splitlines()[0]}")
        raise
