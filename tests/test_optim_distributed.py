"""FusedEmaAdam in 2 and 3 processes: the weights and averages of one process."""

from functools import cache

import pytest
import torch

from tests import _optim_distributed as cases
from tests._distributed import DEVICES, run

TOLERANCE = {"float64": 1e-12, "float32": 2e-6}


@pytest.fixture(
    scope="module",
    params=[(device, world_size) for device in DEVICES for world_size in (2, 3)],
    ids=lambda row: f"{row[0]}, {row[1]} processes",
)
def found(request, tmp_path_factory):
    device, world_size = request.param
    return run(cases.results, world_size, str(tmp_path_factory.mktemp("optim_distributed")), device=device)


@cache
def _of_one_process():
    return cases.one_process(cases.Process())


@pytest.mark.parametrize("name", cases.CASES)
def test_weights_and_averages_are_those_of_one_process(found, name):
    _, dtype = cases.CASES[name]
    assert not any(isinstance(of_rank[name], str) for of_rank in found), [of_rank[name] for of_rank in found]
    assert found[0][name][1] is not None
    for of_rank in found:
        for of_kind, expected_of_kind in zip(of_rank[name], _of_one_process(), strict=True):
            # Only the first process has the averages of ZeroRedundancyOptimizer.
            for tensor, expected in zip(of_kind or [], expected_of_kind if of_kind else [], strict=True):
                assert tensor.dtype == cases.DTYPES[dtype]
                torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=TOLERANCE[dtype])
