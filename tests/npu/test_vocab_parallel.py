"""A vocabulary spread over two processes with NPUs: fused operators, one packed collective, the CPU's results."""

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)

import pytest
import torch
from host_npu.testing import run

from tests.npu import _vocab_parallel as cases

# The processes, and what they count, are the host NPU's.
pytestmark = pytest.mark.simulator

FUSED = {
    "aclnnFusedLinearOnlineMaxSum": 1,
    "aclnnFusedCrossEntropyLossWithMaxSum": 1,
    "aclnnFusedLinearCrossEntropyLossGrad": 1,
}
LAUNCHES = {name: [FUSED, FUSED] for name in cases.CASES if name.startswith("fused")}
LAUNCHES |= {"one shard too small for the operators": [FUSED, {}], "label smoothing": [{}, {}]}


# Gloo's tensors go through the CPU.
@pytest.fixture(scope="module", params=["hccl", "gloo"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def found(backend):
    return run(cases.results, 2, device="npu", backend=backend)


def _assert_close(found, expected):
    expected = expected.detach()
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < 2**-7
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-8 * float(expected.abs().max()))


@pytest.mark.parametrize("name", cases.CASES)
def test_results_equal_those_of_one_process_on_a_cpu(found, name):
    expected = cases.results_and_gradients(*cases.CASES[name], "cpu")
    *of_ranks, heads = zip(*(of_rank[name][0] for of_rank in found), strict=True)
    for of_rank, one in zip(of_ranks, expected[:-1], strict=True):
        for result in of_rank:
            if one.is_floating_point():
                _assert_close(result, one)
            else:
                assert torch.equal(result, one)
    for loss in of_ranks[0]:  # the operators round logits to 16 bits
        torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=1e-4)
    _assert_close(torch.cat(heads), expected[-1])


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_fused_operators_are_launched_if_they_support_the_call(found, name):
    assert [of_rank[name][1] for of_rank in found] == LAUNCHES[name]


@pytest.mark.parametrize("name", cases.CASES)
def test_the_forward_pass_has_one_collective_and_the_backward_pass_another(backend, found, name):
    expected = {"HcclAllGather": 1, "HcclAllReduce": 1} if backend == "hccl" else {}
    assert [of_rank[name][2] for of_rank in found] == [expected, expected]


def test_rows_that_are_ignored_or_absent_contribute_zero(found):
    assert [of_rank["no rows"] for of_rank in found] == [[0] * 6] * 2


def test_a_gradient_can_be_differentiated(found):
    for of_rank in found:
        _assert_close(of_rank["second derivative"], cases.second_derivative("cpu"))
