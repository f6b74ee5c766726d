"""A vocabulary that is spread over two processes with NPUs and a gloo group: fused operators, and the CPU's results."""

import subprocess
import sys
from pathlib import Path

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)

import pytest
import torch

from tests.npu import _vocab_parallel as cases

FUSED = {
    "aclnnFusedLinearOnlineMaxSum": 1,
    "aclnnFusedCrossEntropyLossWithMaxSum": 1,
    "aclnnFusedLinearCrossEntropyLossGrad": 1,
}
LAUNCHES = {
    "fused": [FUSED, FUSED],
    "fused with a z-loss": [FUSED, FUSED],
    "one shard too small for the operators": [FUSED, {}],
    "one shard without classes": [FUSED, {}],
    "label smoothing": [{}, {}],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocab_parallel")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.npu._vocab_parallel", str(folder), str(rank)], cwd=Path(__file__).parents[2]
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", cases.CASES)
def test_the_results_of_one_process_on_a_cpu(found, name):
    sizes, options = cases.CASES[name]
    loss, of_input, of_weight = cases.gradients(sizes, None, "cpu", options)
    of_rank = [found[rank][name][0] for rank in range(2)]
    for rank in range(2):
        # The operators round logits to 16 bits.
        torch.testing.assert_close(of_rank[rank][0], loss, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_rank[rank][1], of_input, rtol=2**-6, atol=2**-8 * float(of_input.abs().max()))
    joined = torch.cat([results[2] for results in of_rank])
    torch.testing.assert_close(joined, of_weight, rtol=2**-6, atol=2**-8 * float(of_weight.abs().max()))


@pytest.mark.parametrize("name", cases.CASES)
def test_the_fused_operators_are_launched_where_they_serve(found, name):
    assert [found[rank][name][1] for rank in range(2)] == LAUNCHES[name]
