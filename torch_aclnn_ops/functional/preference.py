"""Losses of preferences, of the log-probabilities that a head gives to sequences.

Minus the losses of ``linear_cross_entropy(..., reduction="none")`` are log-probabilities, so the memory is the head's,
without logits. Whatever has 16 bits is computed in float32. All have every derivative.
"""

from typing import Literal

from torch_aclnn_ops._numerics import widen
from torch_aclnn_ops._types import Reduction
from torch_aclnn_ops.functional._head.arguments import POSITIVE, check_choice, check_number, check_one_shape

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

LossType = Literal["sigmoid", "hinge", "ipo"]


def sequence_log_probs(
    losses: Tensor, target: Tensor, *, average: bool = False, ignore_index: int = -100, shift: bool | int = False
) -> Tensor:
    """Return the log-probability of each sequence.

    Args:
        losses: what ``linear_cross_entropy(..., reduction="none")`` returns, shape (B, T).
        target: its labels, shape (B, T).
        average: divide by the number of labels that count, as ORPO and SimPO do, and DPO with ``"ipo"``.
        ignore_index: the label of ignored rows.
        shift: as it was given to linear_cross_entropy; the first labels do not count.

    Returns:
        The log-probabilities, shape (B,).

    Example:
        >>> sequence_log_probs(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[5, 6, 7]]), average=True, shift=True)
        tensor([-1.5000])
    """
    check_one_shape("sequence_log_probs", losses=losses, target=target)
    total = -widen(losses).sum(-1)
    if not average:
        return total
    return total / (target[..., int(shift) :] != ignore_index).sum(-1).clamp(min=1)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of Direct Preference Optimization.

    Args:
        chosen: log-probabilities of the preferred sequences under the policy, shape (B,).
        rejected: those of the other sequences, shape (B,).
        reference_chosen: those of the preferred sequences under the reference, shape (B,).
        reference_rejected: those of the other sequences under the reference, shape (B,).
        beta: how far the policy is held to the reference.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``, whose log-probabilities are averages over tokens.
        label_smoothing: share of preferences that are wrong, of ``"sigmoid"`` only.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> dpo_loss(*torch.tensor([[-3.0], [-5.0], [-4.0], [-4.0]]), beta=0.5)
        tensor(0.3133)

    Source: Rafailov et al., "Direct Preference Optimization" (2023); hinge: Zhao et al., "SLiC-HF" (2023); IPO: Azar et
    al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2024); label smoothing:
    Mitchell, "A note on DPO with noisy preferences" (2023).
    """
    tensors = {"chosen": chosen, "rejected": rejected}
    check_one_shape("dpo_loss", **tensors, reference_chosen=reference_chosen, reference_rejected=reference_rejected)
    margins = (widen(chosen) - widen(rejected)) - (widen(reference_chosen) - widen(reference_rejected))
    return _of_margins("dpo_loss", margins, beta, loss_type, label_smoothing, reduction)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the preference part of Contrastive Preference Optimization, which has no reference.

    Its other part is the cross entropy of the preferred sequences, which is the caller's to add.

    Args:
        chosen: log-probabilities of the preferred sequences, shape (B,).
        rejected: those of the other sequences, shape (B,).
        beta: factor of their difference.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``, whose log-probabilities are averages over tokens.
        label_smoothing: share of preferences that are wrong, of ``"sigmoid"`` only.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> cpo_loss(torch.tensor([-3.0]), torch.tensor([-5.0]), beta=0.5)
        tensor(0.3133)

    Source: Xu et al., "Contrastive Preference Optimization" (2024).
    """
    check_one_shape("cpo_loss", chosen=chosen, rejected=rejected)
    margins = widen(chosen) - widen(rejected)
    return _of_margins("cpo_loss", margins, beta, loss_type, label_smoothing, reduction)


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of Simple Preference Optimization, which has no reference.

    Args:
        chosen: log-probabilities of the preferred sequences, averages over tokens, shape (B,).
        rejected: those of the other sequences, shape (B,).
        beta: factor of their difference.
        gamma: by how much the scaled difference should exceed 0.
        label_smoothing: share of preferences that are wrong.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> simpo_loss(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor(0.3133)

    Source: Meng et al., "SimPO" (2024).
    """
    check_one_shape("simpo_loss", chosen=chosen, rejected=rejected)
    margins = widen(chosen) - widen(rejected) - gamma / check_number("simpo_loss", "beta", beta, POSITIVE)
    return _of_margins("simpo_loss", margins, beta, "sigmoid", label_smoothing, reduction)


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, reduction: Reduction = "mean") -> Tensor:
    """Compute the odds-ratio part of Odds Ratio Preference Optimization, which has no reference.

    Its other part is the cross entropy of the preferred sequences, which is the caller's to add.

    Args:
        chosen: log-probabilities of the preferred sequences, averages over tokens and so below 0, shape (B,).
        rejected: those of the other sequences, shape (B,).
        beta: factor of the loss.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> orpo_loss(torch.tensor([-0.5]), torch.tensor([-2.0]))
        tensor(0.0097)

    Source: Hong et al., "ORPO" (2024).
    """
    check_one_shape("orpo_loss", chosen=chosen, rejected=rejected)
    check_number("orpo_loss", "beta", beta, POSITIVE)
    log_odds = [log_probs - (-torch.expm1(log_probs)).log() for log_probs in (widen(chosen), widen(rejected))]
    return _reduce("orpo_loss", -beta * logsigmoid(log_odds[0] - log_odds[1]), reduction)


def kto_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    is_desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of Kahneman-Tversky Optimization.

    Args:
        log_probs: log-probabilities of the sequences under the policy, shape (B,).
        reference_log_probs: those under the reference, shape (B,).
        is_desirable: whether each is an example to follow, bool, shape (B,).
        kl: divergence of policy and reference, 0-dim: the mean of ``log_probs - reference_log_probs`` of prompts with
            answers of other prompts, of all ranks. Below 0 it counts as 0; nothing is differentiated by it.
        beta: how far the policy is held to the reference.
        desirable_weight: factor of the losses of examples to follow.
        undesirable_weight: factor of the others.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss: 0-dim, or with ``"none"`` shape (B,).

    Example:
        >>> kto_loss(torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -4.0]), torch.tensor([True, False]), 0.0, beta=1.0)
        tensor(0.2689)

    Source: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (2024).
    """
    check_one_shape("kto_loss", log_probs=log_probs, reference_log_probs=reference_log_probs, is_desirable=is_desirable)
    if is_desirable.dtype != torch.bool:
        raise TypeError(f"kto_loss: is_desirable must have dtype torch.bool, but it has {is_desirable.dtype}")
    check_number("kto_loss", "beta", beta, POSITIVE)
    ratios = widen(log_probs) - widen(reference_log_probs)
    baseline = torch.as_tensor(kl, dtype=ratios.dtype, device=ratios.device).detach().clamp(min=0)
    signs = torch.where(is_desirable, 1.0, -1.0)
    weights = torch.where(is_desirable, desirable_weight, undesirable_weight)
    return _reduce("kto_loss", weights * torch.sigmoid(-beta * signs * (ratios - baseline)), reduction)


def _of_margins(
    function: str, margins: Tensor, beta: float, loss_type: str, label_smoothing: float, reduction: str
) -> Tensor:
    check_choice(function, "loss_type", loss_type, ("sigmoid", "hinge", "ipo"))
    check_number(function, "beta", beta, POSITIVE)
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss_type != "sigmoid"):
        raise ValueError(
            f'{function}: label_smoothing must be at least 0 and below 0.5, and 0 unless loss_type is "sigmoid", but it'
            f" is {label_smoothing} with {loss_type!r}"
        )
    if loss_type == "hinge":
        losses = relu(1 - beta * margins)
    elif loss_type == "ipo":
        losses = (margins - 1 / (2 * beta)).square()
    else:
        losses = -logsigmoid(beta * margins) * (1 - label_smoothing)
        if label_smoothing:
            losses = losses - logsigmoid(-beta * margins) * label_smoothing
    return _reduce(function, losses, reduction)


def _reduce(function: str, losses: Tensor, reduction: str) -> Tensor:
    check_choice(function, "reduction", reduction, ("none", "mean", "sum"))
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
