"""Losses of the tokens of a policy: one formula per ``loss_type``, and the checks of their options."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch_aclnn_ops._checks import NON_NEGATIVE, POSITIVE, check_choice, check_number

import torch
from torch import Tensor

PolicyLossType = Literal["clip", "cispo", "sapo", "vespo"]
SAPO_TEMPERATURES = (1.0, 1.05)
VESPO_SHAPE = (2.0, 3.0, 3.0, 2.0)
_LARGEST_LOG_RATIO = 20.0  # of "vespo"
_SMALLEST_LOG_RATIO = math.log(1e-8)


class Tokens(NamedTuple):
    """Tokens of sequences; of masked ones all are 0.

    Attributes:
        log_probs: Under the policy, shape (B, T).
        log_ratios: Those minus the ones under the old policy, shape (B, T).
        of_sampler: Log-ratios of the old policy and the sampler, capped, shape (B, T), or None.
        advantages: Shape (B, T) or (B, 1).
        counts: Whether a token is counted, shape (B, T).
    """

    log_probs: Tensor
    log_ratios: Tensor
    of_sampler: Tensor | None
    advantages: Tensor
    counts: Tensor


class Options(NamedTuple):
    """The options of a formula, as in :func:`.policy.grpo_loss`."""

    loss_type: str
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    importance: str
    sapo_temperatures: tuple[float, float]
    vespo_shape: tuple[float, float, float, float]

    def check(self, **numbers: float) -> None:
        """Raise unless all options, and two more numbers, have an accepted value."""
        check_choice("grpo_loss", "loss_type", self.loss_type, tuple(_FORMULAS))
        check_choice("grpo_loss", "importance", self.importance, ("token", "sequence"))
        check_number("grpo_loss", "beta", numbers["beta"], NON_NEGATIVE)
        check_number("grpo_loss", "sampler_cap", numbers["sampler_cap"], POSITIVE)
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


def losses_of_tokens(tokens: Tokens, options: Options) -> tuple[Tensor, Tensor]:
    """Return the losses of tokens and the ratios of their probabilities, shape (B, T) or (B, 1)."""
    log_ratios = tokens.log_ratios
    if options.importance == "sequence":
        log_ratios = log_ratios.sum(-1, keepdim=True) / tokens.counts.sum(-1, keepdim=True).clamp(min=1)
    ratios = log_ratios.exp()
    losses = _FORMULAS[options.loss_type](tokens, ratios, options)
    if tokens.of_sampler is not None and options.loss_type != "vespo":
        losses = losses * tokens.of_sampler.exp()
    return losses, ratios


def _clip(tokens: Tokens, ratios: Tensor, options: Options) -> Tensor:
    above = options.epsilon if options.epsilon_high is None else options.epsilon_high
    clipped = ratios.clamp(1 - options.epsilon, 1 + above)
    ratios = ratios if options.delta is None else ratios.clamp(max=options.delta)
    return -torch.minimum(ratios * tokens.advantages, clipped * tokens.advantages)


def _cispo(tokens: Tokens, ratios: Tensor, options: Options) -> Tensor:
    return -ratios.detach().clamp(max=options.delta) * tokens.advantages * tokens.log_probs


def _sapo(tokens: Tokens, ratios: Tensor, options: Options) -> Tensor:
    temperatures = _by_sign(tokens.advantages > 0, options.sapo_temperatures, ratios)
    return -torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * tokens.advantages


def _vespo(tokens: Tokens, ratios: Tensor, options: Options) -> Tensor:
    log_ratios = tokens.log_ratios.detach().clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    if tokens.of_sampler is not None:
        log_ratios = log_ratios + tokens.of_sampler.clamp(_SMALLEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    log_ratios = log_ratios.sum(-1, keepdim=True).clamp(_SMALLEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    k_positive, l_positive, k_negative, l_negative = options.vespo_shape
    powers = _by_sign(tokens.advantages >= 0, (k_positive, k_negative), ratios)
    rates = _by_sign(tokens.advantages >= 0, (l_positive, l_negative), ratios)
    weights = (powers * log_ratios - rates * torch.expm1(log_ratios)).exp()
    return -weights * tokens.advantages * tokens.log_probs


def _by_sign(is_positive: Tensor, numbers: tuple[float, float], like: Tensor) -> Tensor:
    # Not numbers, of which torch would make tensors of its default dtype.
    positive, other = (torch.full_like(is_positive, number, dtype=like.dtype) for number in numbers)
    return torch.where(is_positive, positive, other)


_FORMULAS: dict[str, Callable[[Tokens, Tensor, Options], Tensor]] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}
