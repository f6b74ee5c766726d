"""How many operators a loss on a head launches on an NPU, each of which costs the device and its host microseconds."""

from torch_aclnn_ops import ops

import torch

from benchmarks._launches import count_launches
from tests.npu._linear_cross_entropy import linear_case

FUSED = {
    "aclnnFusedLinearOnlineMaxSum": 1,
    "aclnnFusedCrossEntropyLossWithMaxSum": 1,
    "aclnnFusedLinearCrossEntropyLossGrad": 1,
}


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
