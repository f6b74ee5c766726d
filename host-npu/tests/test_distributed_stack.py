"""torch.distributed on simulated NPUs with hccl gives the results of CPUs with gloo."""

import pytest
import torch
from host_npu import testing

from tests import _distributed_stack as stack


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of the cases, by world size and device."""
    found = {}

    def of(world_size, device):
        if (world_size, device) not in found:
            folder = str(tmp_path_factory.mktemp("checkpoints"))
            found[world_size, device] = testing.run(stack.results, world_size, folder, world_size, device=device)
        return found[world_size, device]

    return of


CASES = [
    pytest.param(world_size, case.__name__, marks=[] if world_size == 2 else [pytest.mark.exhaustive])
    for world_size, cases in stack.CASES.items()
    for case in cases
]


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_npus_find_what_cpus_find(results, world_size, case):
    for of_npu, of_cpu in zip(results(world_size, "npu"), results(world_size, "cpu"), strict=True):
        assert not isinstance(of_npu[case], str), of_npu[case]
        torch.testing.assert_close(of_npu[case], of_cpu[case], rtol=1e-5, atol=1e-6)
