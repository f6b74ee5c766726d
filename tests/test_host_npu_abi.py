"""The simulated operators through CANN's C interface alone: a C++ program of test cases, one test each.

The program sees the headers of the wheel and of ``csrc/host_npu/include`` and links the simulated libraries. A case
says on which chips it runs; the program is run once for each, and once without the cache of phase one.
"""

import shutil
from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import _torch_npu
from torch_aclnn_ops.host_npu import _libraries

import pytest

from tests import _host_npu_program

_LIBRARIES = Path(torch_aclnn_ops.__file__).parent / "_host_npu"

pytestmark = pytest.mark.skipif(
    bool(_libraries.missing()) or shutil.which("g++") is None, reason="the host NPU was not built, or there is no g++"
)


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    """What the program said of each case."""
    torch_npu = _torch_npu.library().parents[1]
    (program,) = _host_npu_program.compiled(["g++"], torch_npu, [_host_npu_program.shared(_LIBRARIES)])
    return _host_npu_program.results([str(program)])


@pytest.mark.parametrize("name", [*_host_npu_program.names(), _host_npu_program.LAST])
def test_case(name: str, results: dict[str, list[str]]):
    said = results.get(name, ["it did not run"])
    assert set(said) == {"ok"}, "\n".join(said)
