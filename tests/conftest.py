"""Settings for all tests."""

import collections
import gc
import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch_aclnn_ops import _torch_npu
from torch_aclnn_ops.ops.ema_adam import kernels
from torch_aclnn_ops.optim import FusedEmaAdam

import hypothesis
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

if _torch_npu.why_unavailable() is not None:
    # For programs that the tests run and that import torch first.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Child processes on the host NPU also compute in float64, which PyTorch's products refuse on a device.
os.environ.setdefault("HOST_NPU_DTYPES", "torch")

# On a busy machine, synchronizing threads costs ten times the work on tiny tensors.
torch.set_num_threads(1)

# For tensors that modules create at import; each test seeds again.
torch.manual_seed(0)

hypothesis.settings.register_profile("tests", deadline=None, max_examples=100, derandomize=True)
# For tests/fuzz.py: new examples each time, and those that failed before.
_found = {"database": hypothesis.database.DirectoryBasedExampleDatabase(".fuzz/hypothesis"), "print_blob": True}
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=200, derandomize=False, **_found)
hypothesis.settings.load_profile("tests")


_TABLES = {"case": "CASES", "sample": "SAMPLES", "error_input": "ERROR_INPUTS"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a contract once for every entry of the class's table."""
    for argument, table in _TABLES.items():
        if argument not in metafunc.fixturenames or not hasattr(metafunc.cls, table):
            continue
        entries = [pytest.param(entry, id=entry.name) for entry in getattr(metafunc.cls, table)]
        metafunc.parametrize(argument, entries)


def _representatives(cases: list[Any], n: int) -> Iterator[Any]:
    """Yield every n-th case; of a grid, also cases with the missing values of parameters with at most n values."""
    values = [set(case.callspec.indices.items()) for case in cases]
    number = collections.Counter(name for name, _ in set().union(*values))
    seen: set[tuple[str, int]] = set()
    for i, case in enumerate(cases):
        of_few = {(name, value) for name, value in values[i] if number[name] <= n < len(cases) and len(number) > 1}
        if i % n == 0 or not of_few <= seen:
            seen |= of_few
            yield case


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as exhaustive; run the files with the slowest tests first, so that all cores finish together."""
    tables: collections.defaultdict[tuple[str, int], list[Any]] = collections.defaultdict(list)
    for item in items:
        nth = item.get_closest_marker("every_nth_case")
        if nth is not None and item.get_closest_marker("exhaustive") is None and hasattr(item, "callspec"):
            tables[item.nodeid.partition("[")[0], nth.args[0]].append(item)
    for (_, n), cases in tables.items():
        for case in set(cases) - set(_representatives(cases, n)):
            case.add_marker(pytest.mark.exhaustive)
    longest = (
        "npu optim_sharded linear_cross_entropy optimizer_matrix linear_cross_entropy_features vocab_parallel_agreement"
        " trl vocab_parallel package embedding linear_cross_entropy_operators binary_cross_entropy optim examples"
    )
    names = [f"test_{name}.py" for name in longest.split()]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))


gc.disable()  # until all modules are imported, which it would scan repeatedly


def pytest_collection_finish() -> None:
    """Keep the garbage collector from scanning modules, and pytest from torch's loggers; both take long."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # pytest adds its handlers to each logger that does not propagate, six times per test.
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _settings():
    torch.manual_seed(0)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # functorch warns that a custom operator is batched by a loop, or that forward AD is a beta feature.
        warnings.filterwarnings("ignore", message="There is a performance drop because", category=UserWarning)
        yield


@pytest.fixture(params=["torch's CPU kernels", "the operator", "flattened"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementations of FusedEmaAdam; torch's CPU kernels are used where supported, unless disabled."""
    if request.param == "the operator":
        monkeypatch.setattr(kernels, "_NATIVE_DTYPES", ())
    elif request.param == "flattened":
        monkeypatch.setitem(inspect.unwrap(FusedEmaAdam.__init__).__kwdefaults__, "flatten", True)


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    """Return a mesh of only this process, on the CPU."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def group_of_two() -> Iterator[torch.distributed.ProcessGroup]:
    """Return a group in which this process is the first of two, whose collectives do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
