"""``fused_cross_entropy_loss_with_max_sum``: the loss from reduced logits (aclnnFusedCrossEntropyLossWithMaxSum)."""

from torch_aclnn_ops._autograd.raw_operator import RawOperator
from torch_aclnn_ops._checks import check_dtype, check_floating_point, check_rank, check_shape

import torch
from torch import Tensor

_NAME = "fused_cross_entropy_loss_with_max_sum"


def _check(logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor, logits: Tensor | None) -> None:
    others = {"sum_exp_logits": sum_exp_logits, "predicted_logits": predicted_logits}
    check_dtype(_NAME, [torch.float32, torch.float64], "", logits_max=logits_max)
    check_dtype(_NAME, [logits_max.dtype], "as logits_max has", **others)
    check_floating_point(_NAME, logits=logits)
    check_rank(_NAME, 1, logits_max=logits_max)
    check_shape(_NAME, logits_max.shape, "[BT]", **others)
    if logits is not None:
        check_rank(_NAME, 2, logits=logits)
        check_shape(_NAME, (logits_max.shape[0], logits.shape[1]), "[BT, V]", logits=logits)


def formula(
    logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor, logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the softmax if ``logits`` is given."""
    # -log softmax(z)[target] = -(z[target] - max - log sum exp(z - max)), and predicted_logits = z[target] - max.
    loss = sum_exp_logits.log() - predicted_logits
    if logits is None:
        return loss, loss.new_empty(0)
    shifted = logits.to(loss.dtype) - logits_max.unsqueeze(1)
    return loss, shifted.exp() / sum_exp_logits.unsqueeze(1)


def _limits(_soc: str, logits_max: Tensor, *_: object) -> str | None:
    if logits_max.dtype != torch.float32:
        return f"logits_max is {logits_max.dtype} and CANN's operator supports torch.float32"
    return None


def _fake(
    logits_max: Tensor, sum_exp_logits: Tensor, predicted_logits: Tensor, logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    softmax_shape = (0,) if logits is None else logits.shape
    return logits_max.new_empty(logits_max.shape), logits_max.new_empty(softmax_shape)


fused_cross_entropy_loss_with_max_sum = RawOperator(
    "fused_cross_entropy_loss_with_max_sum(Tensor logits_max, Tensor sum_exp_logits, Tensor predicted_logits,"
    " Tensor? logits=None) -> (Tensor loss, Tensor softmax)",
    cann="aclnnFusedCrossEntropyLossWithMaxSum",
    limits=_limits,
    chips=("Ascend910B", "Ascend910_93", "Ascend950"),
    check=_check,
    formula=formula,
    fake=_fake,
)
