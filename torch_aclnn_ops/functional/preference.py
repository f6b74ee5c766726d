"""Preference losses of the log-probabilities of sequences.

The log-probabilities are the negated losses of ``linear_cross_entropy(..., reduction="none")``, so the logits of all
rows are never materialized. 16-bit inputs are computed in float32. All derivatives are supported.
"""

from torch_aclnn_ops._checks import (
    FINITE,
    NON_NEGATIVE,
    POSITIVE,
    Reduction,
    check_bool,
    check_number,
    check_scalar,
    check_shift,
    values_are_readable,
)
from torch_aclnn_ops._tensors import widen
from torch_aclnn_ops.functional._head.arguments import check_constant, check_log_probs, check_one_shape, choose
from torch_aclnn_ops.functional._pairs import OF_REFERENCES, DPOLossType, LossType, Pairs, loss_of_pairs, reduce_losses

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

_ROUNDING_OF_LOSSES = 1e-3  # the computed loss of a certain label may be below 0


def sequence_log_probs(
    losses: Tensor, target: Tensor, *, average: bool = False, ignore_index: int = -100, shift: bool | int = False
) -> Tensor:
    """Return the log-probability of each sequence.

    Args:
        losses: The result of ``linear_cross_entropy(..., reduction="none")``, shape (B, T).
        target: The labels of that call, shape (B, T).
        average: Divide by the number of labels that are not ignored, as ORPO, SimPO, and DPO with ``"ipo"`` need.
        ignore_index: The label of ignored rows.
        shift: The ``shift`` of that call; the first labels are not counted.

    Returns:
        The log-probabilities, shape (B,).

    Example:
        >>> sequence_log_probs(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[5, 6, 7]]), average=True, shift=True)
        tensor([-1.5000])
    """
    check_log_probs("sequence_log_probs", "(B, T)", losses=losses)
    check_one_shape("sequence_log_probs", losses=losses, target=target)
    places = check_shift("sequence_log_probs", shift, target)
    counts = target[..., places:].long() != ignore_index  # as int64, because a uint8 of 156 equals -100
    total = -widen(losses)[..., places:].masked_fill(~counts, 0).sum(-1)
    return total / counts.sum(-1).clamp(min=1) if average else total


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of Direct Preference Optimization.

    Args:
        chosen: Log-probabilities of the preferred sequences under the policy, shape (B,).
        rejected: Log-probabilities of the rejected sequences under the policy, shape (B,).
        reference_chosen: Log-probabilities of the preferred sequences under the reference, shape (B,), without grad.
        reference_rejected: Log-probabilities of the rejected sequences under the reference, shape (B,), without grad.
        beta: Strength of the regularization toward the reference.
        loss_type: ``"sigmoid"``, ``"hinge"``, ``"ipo"``, which expects log-probabilities averaged over tokens,
            ``"robust"``, ``"exo_pair"``, ``"nca_pair"``, ``"bco_pair"`` (without its running mean of rewards),
            ``"sppo_hard"``, ``"apo_zero"``, ``"apo_down"`` or ``"discopop"``.
        label_smoothing: Assumed fraction of wrong preferences, below 0.5; only for ``"sigmoid"``, ``"robust"``, and
            ``"exo_pair"``, where it must be above 0.
        discopop_tau: Temperature of the transition between the two losses of ``"discopop"``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> dpo_loss(*torch.tensor([[-3.0], [-5.0], [-4.0], [-4.0]]), beta=0.5)
        tensor(0.3133)

    Source: Rafailov et al., "Direct Preference Optimization" (2023), and the papers in docs/losses_on_a_head.md; label
    smoothing: Mitchell, "A note on DPO with noisy preferences" (2023).
    """
    references = {"reference_chosen": reference_chosen, "reference_rejected": reference_rejected}
    check_log_probs("dpo_loss", "(B,)", chosen=chosen, rejected=rejected, **references)
    for name, tensor in references.items():
        check_constant("dpo_loss", name, tensor, "a reference")
    margins = (widen(chosen) - widen(rejected)) - (widen(reference_chosen) - widen(reference_rejected))
    ratios = widen(chosen) - widen(reference_chosen), widen(rejected) - widen(reference_rejected)
    pairs = Pairs(margins, *ratios, beta, label_smoothing, discopop_tau)
    return loss_of_pairs("dpo_loss", pairs, loss_type, reduction, OF_REFERENCES)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the preference term of Contrastive Preference Optimization, which needs no reference model.

    Add the other term, the cross entropy of the preferred sequences, to the result.

    Args:
        chosen: Log-probabilities of the preferred sequences, shape (B,).
        rejected: Log-probabilities of the rejected sequences, shape (B,).
        beta: Factor of the difference of log-probabilities.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``, which expects log-probabilities averaged over tokens.
        label_smoothing: Assumed fraction of wrong preferences; only for ``"sigmoid"``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> cpo_loss(torch.tensor([-3.0]), torch.tensor([-5.0]), beta=0.5)
        tensor(0.3133)

    Source: Xu et al., "Contrastive Preference Optimization" (2024).
    """
    check_log_probs("cpo_loss", "(B,)", chosen=chosen, rejected=rejected)
    pairs = Pairs(widen(chosen) - widen(rejected), widen(chosen), widen(rejected), beta, label_smoothing)
    return loss_of_pairs("cpo_loss", pairs, loss_type, reduction)


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of Simple Preference Optimization, which needs no reference model.

    Args:
        chosen: Log-probabilities of the preferred sequences, averaged over tokens, shape (B,).
        rejected: Log-probabilities of the rejected sequences, averaged over tokens, shape (B,).
        beta: Factor of the difference of log-probabilities.
        gamma: Target margin of the scaled difference.
        label_smoothing: Assumed fraction of wrong preferences.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> simpo_loss(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor(0.3133)

    Source: Meng et al., "SimPO" (2024).
    """
    check_log_probs("simpo_loss", "(B,)", chosen=chosen, rejected=rejected)
    target_margin = check_number("simpo_loss", "gamma", gamma, FINITE)
    margins = widen(chosen) - widen(rejected) - target_margin / check_number("simpo_loss", "beta", beta, POSITIVE)
    pairs = Pairs(margins, widen(chosen), widen(rejected), beta, label_smoothing)
    return loss_of_pairs("simpo_loss", pairs, "sigmoid", reduction)


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, reduction: Reduction = "mean") -> Tensor:
    """Compute the odds-ratio term of Odds Ratio Preference Optimization, which needs no reference model.

    Add the other term, the cross entropy of the preferred sequences, to the result.

    Args:
        chosen: Log-probabilities of the preferred sequences, averaged over tokens and therefore at most 0, shape (B,).
        rejected: Log-probabilities of the rejected sequences, averaged over tokens, shape (B,). Those of certain
            sequences, of one rounding error or less, get no gradient, as their odds are infinite.
        beta: Factor of the loss.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Raises:
        ValueError: A log-probability is above 0 by more than rounding, where values can be read: on a CPU, or with
            ``torch_aclnn_ops.check_values(True)``.

    Example:
        >>> orpo_loss(torch.tensor([-0.5]), torch.tensor([-2.0]))
        tensor(0.0097)

    Source: Hong et al., "ORPO" (2024).
    """
    check_log_probs("orpo_loss", "(B,)", chosen=chosen, rejected=rejected)
    check_number("orpo_loss", "beta", beta, POSITIVE)
    losses = -beta * logsigmoid(_log_odds("chosen", chosen) - _log_odds("rejected", rejected))
    return reduce_losses("orpo_loss", losses, reduction)


def kto_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    is_desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    clamp_kl: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of Kahneman-Tversky Optimization.

    Args:
        log_probs: Log-probabilities of the sequences under the policy, shape (B,).
        reference_log_probs: Log-probabilities of the sequences under the reference, shape (B,), without grad.
        is_desirable: Whether each sequence is desirable, bool, shape (B,).
        kl: Estimate of the KL divergence between policy and reference, 0-dim: the mean of ``log_probs -
            reference_log_probs`` over prompts paired with answers to other prompts, over all ranks. It gets no
            gradient.
        beta: Strength of the regularization toward the reference.
        desirable_weight: Factor of the losses of desirable sequences.
        undesirable_weight: Factor of the losses of undesirable sequences.
        clamp_kl: Count a negative ``kl`` as 0, as the paper does.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> kto_loss(torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -4.0]), torch.tensor([True, False]), 0.0, beta=1.0)
        tensor(0.2689)

    Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (2024).
    """
    check_one_shape("kto_loss", log_probs=log_probs, is_desirable=is_desirable)
    check_log_probs("kto_loss", "(B,)", log_probs=log_probs, reference_log_probs=reference_log_probs)
    check_constant("kto_loss", "reference_log_probs", reference_log_probs, "a reference")
    if is_desirable.dtype != torch.bool:
        raise TypeError(f"kto_loss: is_desirable must have dtype torch.bool, but it has {is_desirable.dtype}")
    check_scalar("kto_loss", "kl", kl, FINITE)
    check_number("kto_loss", "beta", beta, POSITIVE)
    check_number("kto_loss", "desirable_weight", desirable_weight, NON_NEGATIVE)
    check_number("kto_loss", "undesirable_weight", undesirable_weight, NON_NEGATIVE)
    check_bool("kto_loss", "clamp_kl", clamp_kl)
    ratios = widen(log_probs) - widen(reference_log_probs)
    baseline = torch.as_tensor(kl, dtype=ratios.dtype, device=ratios.device).detach().reshape(())
    baseline = baseline.clamp(min=0) if clamp_kl else baseline
    signs = choose(is_desirable, (1, -1), ratios)
    weights = choose(is_desirable, (desirable_weight, undesirable_weight), ratios)
    return reduce_losses("kto_loss", weights * torch.sigmoid(-beta * (signs * (ratios - baseline))), reduction)


def _log_odds(name: str, log_probs: Tensor) -> Tensor:
    """Return log-probabilities minus those of the opposite; certain sequences are one rounding error from certain."""
    if values_are_readable(log_probs) and bool((is_wrong := log_probs > _ROUNDING_OF_LOSSES).any()):
        raise ValueError(f"orpo_loss: {name} must be at most 0, but it has {log_probs[is_wrong][0].item()}")
    log_probs = widen(log_probs)
    log_probs = log_probs.clamp(max=-torch.finfo(log_probs.dtype).eps)
    return log_probs - (-torch.expm1(log_probs)).log()
