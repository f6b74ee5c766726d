"""linear_cross_entropy with a vocabulary that is spread over 1, 2, 3 and 4 processes: the results of one process."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests import _vocab_parallel as cases

WORLD_SIZES = (1, 2, 3, 4)
# What the processes' errors may be above those of one process, relative to a tensor's largest number.
TOLERANCE = {"float64": 1e-13, "float32": 5e-7, "bfloat16": 2**-9}


@pytest.fixture(scope="module", params=WORLD_SIZES, ids=lambda world_size: f"{world_size} processes")
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab_parallel")
    command = [sys.executable, "-m", "tests._vocab_parallel", str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), str(request.param)], cwd=Path(__file__).parents[1])
        for rank in range(request.param)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0] * request.param
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@cache
def _of_one_process(name, dtype):
    function, *_ = cases.CASES[name]
    found = function(cases.Vocabulary(dtype=cases.DTYPES[dtype]))
    return {key: tensor.detach() for key, tensor in found.items()}


def _joined(key, tensors):
    kind = key.partition(".")[0]
    if kind == "shard":
        return [torch.cat(tensors)]
    return [sum(tensors)] if kind == "part" else tensors


def _error(tensor, truth):
    if not truth.is_floating_point() or truth.numel() == 0:
        return float((tensor != truth).any())
    return float((tensor.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("name", cases.CASES)
def test_the_results_of_one_process(found, name):
    dtype = cases.CASES[name][2]
    assert not any(isinstance(of_rank[name], str) for of_rank in found), [of_rank[name] for of_rank in found]
    truth, single = _of_one_process(name, "float64"), _of_one_process(name, dtype)
    assert found[0][name].keys() == truth.keys()
    for key in truth:
        for tensor in _joined(key, [of_rank[name][key] for of_rank in found]):
            assert tensor.dtype == single[key].dtype and tensor.shape == single[key].shape, key
            assert _error(tensor, truth[key]) <= _error(single[key], truth[key]) + TOLERANCE[dtype], key
