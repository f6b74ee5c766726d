"""A vocabulary spread over two processes with NPUs: fused operators, one packed collective, the CPU's results."""

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)

import math

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
LAUNCHES = {
    "fused": [FUSED, FUSED],
    "fused, none": [FUSED, FUSED],
    "fused, an ignore_index that is a class": [FUSED, FUSED],
    "fused, weights": [FUSED, FUSED],
    "fused with a z-loss": [FUSED, FUSED],
    "one shard too small for the operators": [FUSED, {}],
    "label smoothing": [{}, {}],
}


# Gloo's tensors go through the CPU.
@pytest.fixture(scope="module", params=["hccl", "gloo"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def found(backend):
    return run(cases.results, 2, device="npu", backend=backend)


@pytest.mark.parametrize("name", cases.CASES)
def test_results_equal_those_of_one_process_on_a_cpu(found, name):
    loss, of_input, of_weight = cases.gradients(*cases.CASES[name], "cpu")
    of_rank = [of_case[name][0] for of_case in found]
    for rank in range(2):
        # The operators round logits to 16 bits.
        torch.testing.assert_close(of_rank[rank][0], loss, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_rank[rank][1], of_input, rtol=2**-6, atol=2**-8 * float(of_input.abs().max()))
    joined = torch.cat([results[2] for results in of_rank])
    torch.testing.assert_close(joined, of_weight, rtol=2**-6, atol=2**-8 * float(of_weight.abs().max()))


@pytest.mark.parametrize("name", cases.CASES)
def test_the_fused_operators_are_launched_if_they_support_the_call(found, name):
    assert [of_rank[name][1] for of_rank in found] == LAUNCHES[name]


@pytest.mark.parametrize("name", cases.CASES)
def test_the_forward_pass_has_one_collective_and_the_backward_pass_another(backend, found, name):
    expected = {"HcclAllGather": 1, "HcclAllReduce": 1} if backend == "hccl" else {}
    assert [of_rank[name][2] for of_rank in found] == [expected, expected]


def test_rows_that_are_ignored_or_absent_contribute_zero(backend):
    assert run(cases.rows_that_are_ignored_or_absent, 2, device="npu", backend=backend) == [[0] * 6] * 2


def test_outputs_and_their_gradients_equal_those_of_one_process(backend):
    for whole, shard in run(cases.outputs, 2, device="npu", backend=backend):
        for expected, found in zip(whole, shard, strict=True):
            assert float((found - expected).norm() / expected.norm()) < 2**-7


def test_predicted_tokens_are_returned_with_losses_whose_gradients_are_those_of_one_process(backend):
    for whole, shard in run(cases.predicted_tokens, 2, device="npu", backend=backend):
        assert torch.equal(whole[0], shard[0])
        for expected, found in zip(whole[1:], shard[1:], strict=True):
            assert float((found - expected).norm() / expected.norm()) < 2**-7


def test_a_gradient_can_be_differentiated(backend):
    for expected, found in run(cases.second_derivative, 2, device="npu", backend=backend):
        assert float((found - expected).norm() / expected.norm()) < 2**-7


DISAGREEMENTS = {
    "target": "target must be the same on every rank",
    "an ignored row": "target must be the same on every rank",
    "input": "input must be the same on every rank",
    "zero_if_all_ignored": "zero_if_all_ignored must be the same on every rank",
    "softcap": "softcap must be the same on every rank",
    "chunk_size": "whether CANN's operators compute the loss must be the same on every rank",
    "a bias": "whether CANN's operators compute the loss must be the same on every rank",
    "the whole head": "linear_weight must be this rank's shard of the head, but it is the same on every rank",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_all_losses_and_gradients_are_nan_if_the_processes_disagree(backend, what):
    for results in run(cases.disagreement, 2, what, False, device="npu", backend=backend):
        assert all(tensor.isnan().all() for tensor in results)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_every_process_raises_if_they_disagree_and_values_are_checked(backend, what):
    for error in run(cases.disagreement, 2, what, True, device="npu", backend=backend):
        assert DISAGREEMENTS[what] in error


def test_a_head_of_zeros_is_not_taken_for_the_whole_head_on_every_rank(backend):
    for losses in run(cases.heads_of_zeros, 2, device="npu", backend=backend):
        expected = [0 if row == 1 else math.log(cases.CLASSES) for row in range(cases.ROWS)]
        assert losses == pytest.approx(expected)
