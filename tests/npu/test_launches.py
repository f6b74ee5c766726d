"""The number of operators that a call launches on an NPU, each of which costs microseconds."""

from collections import Counter

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import ops
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from benchmarks._launches import count_launches
from tests._contract import Maker
from tests._linear_kl_div import head_of_teacher, student
from tests.npu._operators import linear_case

# A device's operators launch others than the host NPU's.
pytestmark = pytest.mark.simulator

FUSED = Counter(
    ["aclnnFusedLinearOnlineMaxSum", "aclnnFusedCrossEntropyLossWithMaxSum", "aclnnFusedLinearCrossEntropyLossGrad"]
)
# Forward and backward, with CANN's three operators.
LAUNCHES = {
    "mean": ({}, 23),
    "sum": ({"reduction": "sum"}, 20),
    "none": ({"reduction": "none"}, 19),
    "zero_if_all_ignored": ({"zero_if_all_ignored": True}, 26),
    "an ignore_index that is a class": ({"ignore_index": 5}, 25),
    "class weights": ({"weight": Maker(torch.float32).probability(160)}, 29),
    "z-loss": ({"lse_square_scale": 0.1}, 29),
    "z-loss, none": ({"lse_square_scale": 0.1, "reduction": "none"}, 25),
    "log_probabilities": ({"outputs": ("log_probabilities",)}, 24),
    "logsumexp": ({"outputs": ("logsumexp",)}, 26),
    "token weights": ({"token_weight": Maker(torch.float32).probability(24)}, 28),
}


@pytest.mark.parametrize(("options", "number"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_loss_launches_little_around_cann_s_three_operators(options, number):
    input, weight, target = (tensor.npu() for tensor in linear_case(torch.bfloat16))
    leaves = input.requires_grad_(), weight.requires_grad_()
    options = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}

    def call():
        result = F.linear_cross_entropy(*leaves, target, **options)
        loss = getattr(result, "loss", result)
        torch.autograd.grad(loss, leaves, torch.ones_like(loss))

    launches = count_launches(call)
    assert launches.total() == number and launches & FUSED == FUSED


@pytest.mark.parametrize(
    ("options", "number"), [({}, 17), ({"ignore_index": 5}, 17), ({"zero_if_all_ignored": True}, 22)], ids=str
)
def test_few_logits_launch_what_ignored_infinities_and_classes_out_of_range_need_besides_torch_s(options, number):
    input, weight, target = (tensor.npu() for tensor in linear_case(torch.float32))
    leaves = input.requires_grad_(), weight.requires_grad_()

    def call():
        torch.autograd.grad(F.linear_cross_entropy(*leaves, target, **options), leaves)

    def of_torch():
        torch.autograd.grad(nn.functional.cross_entropy(nn.functional.linear(*leaves), target), leaves)

    assert (count_launches(call).total(), count_launches(of_torch).total()) == (number, 8)


@pytest.mark.parametrize(("reduction", "number"), [("mean", 23), ("none", 22)])
def test_a_divergence_launches_only_what_it_computes(reduction, number):
    leaves = [one.detach().npu().requires_grad_() for one in student(torch.float32)[:2]]
    teacher = [one.npu() for one in head_of_teacher(torch.float32)[:2]]

    def call():
        loss = F.linear_kl_div(*leaves, *teacher, reduction=reduction)
        torch.autograd.grad(loss, leaves, torch.ones_like(loss))

    assert count_launches(call).total() == number


def test_the_raw_operators_launch_cann_s_and_nothing_else():
    input, weight, target = (tensor.npu() for tensor in linear_case(torch.bfloat16))
    grad = torch.ones(len(target)).npu()

    def call():
        logits_max, sum_exp_logits, predicted, mask, masked, _ = ops.fused_linear_online_max_sum(
            input, weight, target, 0, len(weight)
        )
        ops.fused_cross_entropy_loss_with_max_sum(logits_max, sum_exp_logits, predicted)
        ops.fused_linear_cross_entropy_loss_grad(grad, input, weight, mask, masked, logits_max, sum_exp_logits)

    assert count_launches(call) == FUSED


ADAM = "aclnnApplyFusedEmaAdam"


@pytest.mark.parametrize(
    ("dtype", "options", "launches"),
    [
        (torch.float32, {}, {ADAM: 50, "add_": 1}),
        (torch.float32, {"ema_warmup": "ratio"}, {ADAM: 50, "add_": 1}),
        (torch.float32, {"ema_start_step": 2}, {ADAM: 50, "add_": 1}),
        (torch.float32, {"maximize": True}, {ADAM: 50, "add_": 1, "_foreach_neg": 1}),
        (torch.bfloat16, {}, {ADAM: 50, "add_": 1, "_foreach_copy_": 2}),
        (torch.bfloat16, {"master_weights": False}, {ADAM: 50, "add_": 1}),
        (torch.float32, {"flatten": True}, {ADAM: 1, "add_": 1}),
        (torch.bfloat16, {"flatten": True}, {ADAM: 1, "add_": 1, "_foreach_copy_": 2}),
    ],
    ids=str,
)
def test_a_step_launches_one_operator_a_parameter_or_buffer_and_one_for_all_step_counts(dtype, options, launches):
    weights = [nn.Parameter(torch.randn(16, device="npu").to(dtype)) for _ in range(50)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = FusedEmaAdam(weights, **options)
    optimizer.step()
    assert count_launches(optimizer.step) == launches


def test_a_parameter_without_a_gradient_splits_the_launch_of_the_step_counts():
    weights = [nn.Parameter(torch.randn(16, device="npu")) for _ in range(5)]
    optimizer = FusedEmaAdam(weights, ema_without_grad=False)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    weights[2].grad = None
    assert count_launches(optimizer.step) == {ADAM: 4, "add_": 2}
    assert [int(optimizer.state[weight]["step"]) for weight in weights] == [3, 3, 1, 3, 3]
