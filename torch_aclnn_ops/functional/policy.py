"""Policy losses of the log-probabilities of tokens, one formula per ``loss_type``; memory as in ``preference.py``."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch_aclnn_ops._checks import (
    AT_LEAST_1,
    NON_NEGATIVE,
    POSITIVE,
    check_bool,
    check_choice,
    check_number,
    check_scalar,
    describe,
    values_are_readable,
)
from torch_aclnn_ops._tensors import widen
from torch_aclnn_ops.functional._head.arguments import check_constant, check_log_probs, check_one_shape, choose

import torch
from torch import Tensor

TokenReduction = Literal["sequence", "token", "constant", "none"]
PolicyLossType = Literal["clip", "cispo", "sapo", "vespo"]
SAPO_TEMPERATURES = (1.0, 1.05)
VESPO_SHAPE = (2.0, 3.0, 3.0, 2.0)
_LARGEST_LOG_RATIO = 20.0  # of "vespo"
_SMALLEST_LOG_RATIO = math.log(1e-8)


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    sampler_log_probs: Tensor | None = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance: Literal["token", "sequence"] = "token",
    loss_type: PolicyLossType = "clip",
    sapo_temperatures: tuple[float, float] = SAPO_TEMPERATURES,
    vespo_shape: tuple[float, float, float, float] = VESPO_SHAPE,
    sampler_cap: float = 3.0,
    is_kl_corrected: bool = False,
    reduction: TokenReduction = "sequence",
    length: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """Compute the loss of Group Relative Policy Optimization, or of one of its variants.

    Args:
        log_probs: Log-probabilities of the tokens under the policy, shape (B, T).
        advantages: Advantage of each sequence, shape (B,), or of each token, shape (B, T).
        mask: Tokens that are counted, shape (B, T): bool, or 0 and 1.
        old_log_probs: Log-probabilities under the policy that generated the sequences, shape (B, T), without grad; by
            default those of the current policy.
        reference_log_probs: Log-probabilities under the reference, shape (B, T), without grad; required unless ``beta``
            is 0.
        sampler_log_probs: Log-probabilities computed by the engine that generated the sequences, shape (B, T), without
            grad. The losses of tokens, without the KL divergence, are multiplied by the ratio of probabilities under
            the old policy and the engine; with ``"vespo"`` it is part of the weight of the sequence.
        beta: Factor of the KL divergence from the reference, which is estimated as ``exp(d) - d - 1``, where ``d`` is
            the log-probability under the reference minus the one under the policy.
        epsilon: The ratio of probabilities is clipped below ``1 - epsilon``; only for ``"clip"``.
        epsilon_high: The ratio is clipped above ``1 + epsilon_high``; ``epsilon`` by default; only for ``"clip"``.
        delta: Upper bound of the unclipped ratio, none by default; with ``"cispo"``, which requires it, of the ratio.
        importance: ``"token"``, one ratio per token; or ``"sequence"``, one ratio per sequence, the geometric mean of
            the ratios of its tokens (GSPO), not for ``"vespo"``.
        loss_type: ``"clip"``, the smaller of clipped and unclipped objective; ``"cispo"``, log-probabilities weighted
            by the bounded ratio; ``"sapo"``, a sigmoid of the ratio; or ``"vespo"``, log-probabilities weighted by
            ``exp(l (1 - w)) w ** k``, where ``w`` is the ratio of the sequence. The weights get no gradient.
        sapo_temperatures: Temperatures of ``"sapo"`` for positive advantages, and for others.
        vespo_shape: ``k`` and ``l`` of ``"vespo"`` for advantages of at least 0, then for others.
        sampler_cap: Upper bound of the ratio of ``sampler_log_probs``.
        is_kl_corrected: Multiply the KL divergence by the ratio, which makes it unbiased for tokens of the old policy.
        reduction: ``"sequence"``, the mean over sequences of their means over tokens; ``"token"``, the mean over all
            tokens (DAPO); ``"constant"``, the sum over all tokens divided by B and ``length`` (Dr. GRPO); or
            ``"none"``, the losses of tokens, 0 where they are masked.
        length: Maximum length of a completion; only for ``"constant"``. 1 gives the mean of the sequences' sums, which
            is LUSPO with ``importance="sequence"``.
        num_items_in_batch: Divide by this number of tokens instead of those of ``mask``, for example of all micro
            batches, a number or 0-dim; only for ``"token"``.

    Returns:
        The loss, 0-dim, or with ``"none"`` shape (B, T).

    Example:
        >>> log_probs = torch.full((1, 2), -1.0)
        >>> grpo_loss(log_probs, torch.tensor([2.0]), torch.ones(1, 2), old_log_probs=log_probs - 1)
        tensor(-2.4000)

    Source: Shao et al., "DeepSeekMath" (2024), and the papers in docs/losses_on_a_head.md.
    """
    owners = {"old": "the older policy", "reference": "a reference", "sampler": "the engine that generated them"}
    given = dict(zip(owners, (old_log_probs, reference_log_probs, sampler_log_probs), strict=True))
    constants = {f"{name}_log_probs": one for name, one in given.items() if one is not None}
    check_one_shape("grpo_loss", log_probs=log_probs, mask=mask)
    check_log_probs("grpo_loss", "(B, T)", log_probs=log_probs, **constants)
    for name, tensor in constants.items():
        # With the current log-probabilities as the old ones, the gradient of the ratio would be 0.
        check_constant("grpo_loss", name, tensor, owners[name.removesuffix("_log_probs")])
    _check_advantages(advantages, log_probs)
    _check_mask(mask)
    options = _Options(loss_type, epsilon, epsilon_high, delta, importance, sapo_temperatures, vespo_shape)
    options.check()
    check_number("grpo_loss", "beta", beta, NON_NEGATIVE)
    check_number("grpo_loss", "sampler_cap", sampler_cap, POSITIVE)
    check_bool("grpo_loss", "is_kl_corrected", is_kl_corrected)
    if beta != 0 and reference_log_probs is None:
        raise ValueError(f"grpo_loss: reference_log_probs must be given where beta is not 0, but beta is {beta}")
    _check_reduction(reduction, length, num_items_in_batch)
    counts = mask != 0
    # Before any arithmetic, so that no derivative sees what a masked token has.
    policy = widen(log_probs).masked_fill(~counts, 0)
    old, reference, sampler = (None if one is None else widen(one).masked_fill(~counts, 0) for one in given.values())
    is_of_tokens = advantages.shape == log_probs.shape
    advantages = widen(advantages).masked_fill(~counts, 0) if is_of_tokens else widen(advantages).unsqueeze(-1)
    old = policy.detach() if old is None else old
    # The logarithm of the capped ratio.
    of_sampler = None
    if sampler is not None:
        of_sampler = (old - sampler).clamp(max=math.log(sampler_cap)).masked_fill(~counts, 0)
    tokens = _Tokens(policy, policy - old, of_sampler, advantages, counts)
    losses, ratios = _losses_of_tokens(tokens, options)
    if beta != 0 and reference is not None:
        divergences = torch.expm1(reference - policy) - (reference - policy)
        losses = losses + beta * (divergences * ratios if is_kl_corrected else divergences)
    return _reduce(torch.where(counts, losses, 0), counts, reduction, length, num_items_in_batch)


def _reduce(
    losses: Tensor, counts: Tensor, reduction: str, length: int | None, num_items: Tensor | float | None
) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sequence":
        return (losses.sum(-1) / counts.sum(-1).clamp(min=1)).mean()
    if length is not None:
        return losses.sum() / (losses.shape[0] * length)
    if isinstance(num_items, Tensor):
        return losses.sum() / num_items.reshape(()).to(losses.dtype)
    return losses.sum() / (counts.sum().clamp(min=1) if num_items is None else num_items)


def _check_reduction(reduction: str, length: int | None, num_items: Tensor | float | None) -> None:
    check_choice("grpo_loss", "reduction", reduction, ("sequence", "token", "constant", "none"))
    if (reduction == "constant") != (length is not None):
        raise ValueError(
            f'grpo_loss: length must be given with reduction "constant", and only then, but it is {length!r} with'
            f" {reduction!r}"
        )
    if length is not None:
        check_number("grpo_loss", "length", length, AT_LEAST_1)
    if num_items is None:
        return
    if reduction != "token":
        raise ValueError(
            f'grpo_loss: num_items_in_batch must be None unless reduction is "token", but it is {num_items!r} with'
            f" {reduction!r}"
        )
    check_scalar("grpo_loss", "num_items_in_batch", num_items, POSITIVE)


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


class _Tokens(NamedTuple):
    """Tokens of sequences, shape (B, T); all values of masked tokens are 0."""

    log_probs: Tensor  # under the policy
    log_ratios: Tensor  # those minus the ones under the old policy
    of_sampler: Tensor | None  # log-ratios of the old policy and the sampler, capped
    advantages: Tensor  # shape (B, T) or (B, 1)
    counts: Tensor  # whether a token is counted


class _Options(NamedTuple):
    """The options of a formula, as in :func:`.policy.grpo_loss`."""

    loss_type: str
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    importance: str
    sapo_temperatures: tuple[float, float]
    vespo_shape: tuple[float, float, float, float]

    def check(self) -> None:
        """Raise unless all options have an accepted value."""
        check_choice("grpo_loss", "loss_type", self.loss_type, tuple(_FORMULAS))
        check_choice("grpo_loss", "importance", self.importance, ("token", "sequence"))
        for name in ("epsilon", "epsilon_high", "delta"):
            value = getattr(self, name)
            if value is not None or name == "epsilon":
                check_number("grpo_loss", name, value, NON_NEGATIVE)
        _check_numbers("sapo_temperatures", self.sapo_temperatures, 2)
        _check_numbers("vespo_shape", self.vespo_shape, 4)
        for name, (default, loss_types) in _ONLY_FOR.items():
            value = getattr(self, name)
            if self.loss_type not in loss_types and value != default:
                raise ValueError(
                    f"grpo_loss: {name} must be {default!r}, the default, with loss_type {self.loss_type!r}, but it is"
                    f" {value!r}"
                )
        if self.loss_type == "cispo" and self.delta is None:
            raise ValueError("grpo_loss: delta must be a number with loss_type 'cispo', but it is None")


# The default of an option, and the losses that use it.
_ONLY_FOR: dict[str, tuple[Any, tuple[str, ...]]] = {
    "epsilon": (0.2, ("clip",)),
    "epsilon_high": (None, ("clip",)),
    "delta": (None, ("clip", "cispo")),
    "importance": ("token", ("clip", "cispo", "sapo")),
    "sapo_temperatures": (SAPO_TEMPERATURES, ("sapo",)),
    "vespo_shape": (VESPO_SHAPE, ("vespo",)),
}


def _check_numbers(name: str, values: Any, size: int) -> None:
    if not isinstance(values, tuple) or len(values) != size:
        raise TypeError(f"grpo_loss: {name} must be a tuple of {size} numbers, but it is {values!r}")
    for value in values:
        check_number("grpo_loss", name, value, POSITIVE)


def _losses_of_tokens(tokens: _Tokens, options: _Options) -> tuple[Tensor, Tensor]:
    """Return the losses of tokens and the ratios of their probabilities, shape (B, T) or (B, 1)."""
    log_ratios = tokens.log_ratios
    if options.importance == "sequence":
        log_ratios = log_ratios.sum(-1, keepdim=True) / tokens.counts.sum(-1, keepdim=True).clamp(min=1)
    ratios = log_ratios.exp()
    losses = _FORMULAS[options.loss_type](tokens, ratios, options)
    if tokens.of_sampler is not None and options.loss_type != "vespo":
        losses = losses * tokens.of_sampler.exp()
    return losses, ratios


def _clip(tokens: _Tokens, ratios: Tensor, options: _Options) -> Tensor:
    above = options.epsilon if options.epsilon_high is None else options.epsilon_high
    clipped = ratios.clamp(1 - options.epsilon, 1 + above)
    ratios = ratios if options.delta is None else ratios.clamp(max=options.delta)
    return -torch.minimum(ratios * tokens.advantages, clipped * tokens.advantages)


def _cispo(tokens: _Tokens, ratios: Tensor, options: _Options) -> Tensor:
    return -ratios.detach().clamp(max=options.delta) * tokens.advantages * tokens.log_probs


def _sapo(tokens: _Tokens, ratios: Tensor, options: _Options) -> Tensor:
    temperatures = choose(tokens.advantages > 0, options.sapo_temperatures, ratios)
    return -torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * tokens.advantages


def _vespo(tokens: _Tokens, ratios: Tensor, options: _Options) -> Tensor:
    log_ratios = tokens.log_ratios.detach().clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    if tokens.of_sampler is not None:
        log_ratios = log_ratios + tokens.of_sampler.clamp(_SMALLEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    log_ratios = log_ratios.sum(-1, keepdim=True).clamp(_SMALLEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    k_positive, l_positive, k_negative, l_negative = options.vespo_shape
    powers = choose(tokens.advantages >= 0, (k_positive, k_negative), ratios)
    rates = choose(tokens.advantages >= 0, (l_positive, l_negative), ratios)
    weights = (powers * log_ratios - rates * torch.expm1(log_ratios)).exp()
    return -weights * tokens.advantages * tokens.log_probs


_FORMULAS: dict[str, Callable[[_Tokens, Tensor, _Options], Tensor]] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}
