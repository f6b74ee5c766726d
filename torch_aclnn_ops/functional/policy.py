"""Policy losses of the log-probabilities of tokens; memory as in ``preference.py``."""

from typing import Literal

from torch_aclnn_ops._checks import check_choice, describe, values_are_readable
from torch_aclnn_ops._head_options import AT_LEAST_1, NON_NEGATIVE, check_number
from torch_aclnn_ops._numerics import widen
from torch_aclnn_ops.functional._head.arguments import check_constant, check_log_probs, check_one_shape

import torch
from torch import Tensor

TokenReduction = Literal["sequence", "token", "constant"]


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance: Literal["token", "sequence"] = "token",
    reduction: TokenReduction = "sequence",
    length: int | None = None,
) -> Tensor:
    """Compute the clipped loss of Group Relative Policy Optimization.

    Args:
        log_probs: Log-probabilities of the tokens under the policy, shape (B, T).
        advantages: Advantage of each sequence, shape (B,), or of each token, shape (B, T).
        mask: Tokens that are counted, shape (B, T): bool, or 0 and 1.
        old_log_probs: Log-probabilities under the policy that generated the sequences, shape (B, T), without grad; by
            default those of the current policy.
        reference_log_probs: Log-probabilities under the reference, shape (B, T), without grad; required unless ``beta``
            is 0.
        beta: Factor of the KL divergence from the reference, which is estimated as ``exp(d) - d - 1``, where ``d`` is
            the log-probability under the reference minus the one under the policy.
        epsilon: The ratio of probabilities is clipped below ``1 - epsilon``.
        epsilon_high: The ratio is clipped above ``1 + epsilon_high``; ``epsilon`` by default.
        delta: Upper bound of the unclipped ratio; none by default.
        importance: ``"token"``, one ratio per token; or ``"sequence"``, one ratio per sequence, the geometric mean of
            the ratios of its tokens (GSPO).
        reduction: ``"sequence"``, the mean over sequences of their means over tokens; ``"token"``, the mean over all
            tokens (DAPO); or ``"constant"``, the sum over all tokens divided by B and ``length`` (Dr. GRPO).
        length: Maximum length of a completion; only for ``"constant"``.

    Returns:
        The loss, 0-dim.

    Example:
        >>> log_probs = torch.full((1, 2), -1.0)
        >>> grpo_loss(log_probs, torch.tensor([2.0]), torch.ones(1, 2), old_log_probs=log_probs - 1)
        tensor(-2.4000)

    Source: Shao et al., "DeepSeekMath" (2024); token mean and ``epsilon_high``: Yu et al., "DAPO" (2025); constant: Liu
    et al., "Understanding R1-Zero-Like Training" (2025); sequence ratios: Zheng et al., "Group Sequence Policy
    Optimization" (2025).
    """
    given = {"old_log_probs": old_log_probs, "reference_log_probs": reference_log_probs}
    check_one_shape("grpo_loss", log_probs=log_probs, mask=mask)
    constants = {name: one for name, one in given.items() if one is not None}
    check_log_probs("grpo_loss", "(B, T)", log_probs=log_probs, **constants)
    owners = {"old_log_probs": "the older policy", "reference_log_probs": "a reference"}
    for name, tensor in constants.items():
        # With the current log-probabilities as the old ones, the gradient of the ratio would be 0.
        check_constant("grpo_loss", name, tensor, owners[name])
    check_choice("grpo_loss", "importance", importance, ("token", "sequence"))
    check_choice("grpo_loss", "reduction", reduction, ("sequence", "token", "constant"))
    for name, value in (("beta", beta), ("epsilon", epsilon), ("epsilon_high", epsilon_high), ("delta", delta)):
        if value is not None:
            check_number("grpo_loss", name, value, NON_NEGATIVE)
    _check_advantages(advantages, log_probs)
    _check_mask(mask)
    if beta != 0 and reference_log_probs is None:
        raise ValueError(f"grpo_loss: reference_log_probs must be given where beta is not 0, but beta is {beta}")
    if (reduction == "constant") != (length is not None):
        raise ValueError(
            f'grpo_loss: length must be given with reduction "constant", and only then, but it is {length!r} with'
            f" {reduction!r}"
        )
    if length is not None:
        length = check_number("grpo_loss", "length", length, AT_LEAST_1)
    counts = mask != 0
    # Before any arithmetic, so that no derivative sees what a masked token has.
    policy = widen(log_probs).masked_fill(~counts, 0)
    old, reference = (None if one is None else widen(one).masked_fill(~counts, 0) for one in given.values())
    is_of_tokens = advantages.shape == log_probs.shape
    advantages = widen(advantages).masked_fill(~counts, 0) if is_of_tokens else widen(advantages).unsqueeze(-1)
    log_ratios = policy - (policy.detach() if old is None else old)
    if importance == "sequence":
        log_ratios = log_ratios.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    ratios = ratios if delta is None else ratios.clamp(max=delta)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    if beta != 0 and reference is not None:
        losses = losses + beta * (torch.expm1(reference - policy) - (reference - policy))
    losses = torch.where(counts, losses, 0)
    if reduction == "sequence":
        return (losses.sum(-1) / counts.sum(-1).clamp(min=1)).mean()
    divisor = counts.sum().clamp(min=1) if length is None else log_probs.shape[0] * length
    return losses.sum() / divisor


def _check_advantages(advantages: object, log_probs: Tensor) -> None:
    if not isinstance(advantages, Tensor):
        raise TypeError(f"grpo_loss: advantages must be a Tensor, but it is {describe(advantages)}")
    if advantages.shape not in (log_probs.shape, log_probs.shape[:-1]):
        raise ValueError(
            f"grpo_loss: advantages must have shape {list(log_probs.shape[:-1])} or {list(log_probs.shape)}, but its"
            f" shape is {list(advantages.shape)}"
        )


def _check_mask(mask: Tensor) -> None:
    """Raise for numbers other than 0 and 1, such as weights or labels, where values can be read."""
    if mask.dtype == torch.bool or not values_are_readable(mask):
        return
    others = mask[(mask != 0) & (mask != 1)]
    if others.numel():
        raise ValueError(f"grpo_loss: mask must be bool, or have only 0 and 1, but it has {others[0].item()}")
