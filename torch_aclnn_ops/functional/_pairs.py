"""Losses of pairs of sequences: one formula per ``loss_type``, and the checks of their options."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from torch_aclnn_ops._checks import NON_NEGATIVE, POSITIVE, check_choice, check_number

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, threshold

LossType = Literal["sigmoid", "hinge", "ipo"]
DPOLossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]


class Pairs(NamedTuple):
    """Pairs of sequences, and the options of their loss."""

    margins: Tensor  # ``chosen - rejected``, computed without the cancellation of the references
    chosen: Tensor  # log-probabilities of the preferred sequences, relative to the reference if there is one
    rejected: Tensor  # those of the rejected sequences
    beta: float  # factor of all of them
    label_smoothing: float  # assumed fraction of wrong preferences
    discopop_tau: float = 0.05  # width of the transition of "discopop"


def _sigmoid(pairs: Pairs) -> Tensor:
    scores, wrong = pairs.beta * pairs.margins, pairs.label_smoothing
    losses = -logsigmoid(scores) * (1 - wrong)
    return losses - logsigmoid(-scores) * wrong if wrong else losses


def _robust(pairs: Pairs) -> Tensor:
    scores, wrong = pairs.beta * pairs.margins, pairs.label_smoothing
    return (wrong * logsigmoid(-scores) - (1 - wrong) * logsigmoid(scores)) / (1 - 2 * wrong)


def _exo_pair(pairs: Pairs) -> Tensor:
    scores, wrong = pairs.beta * pairs.margins, pairs.label_smoothing
    of_chosen = torch.sigmoid(scores) * (logsigmoid(scores) - math.log1p(-wrong))
    return of_chosen + torch.sigmoid(-scores) * (logsigmoid(-scores) - math.log(wrong))


def _nca_pair(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def _discopop(pairs: Pairs) -> Tensor:
    scores = pairs.beta * pairs.margins
    scaled = scores / pairs.discopop_tau
    # The product of a sigmoid and exp(-scores) in one exponential, because far below 0 it is 0 times inf.
    return -logsigmoid(scores) * torch.sigmoid(-scaled) + torch.exp(logsigmoid(scaled) - scores)


_FORMULAS: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": lambda pairs: threshold(1 - pairs.beta * pairs.margins, 0, 0),  # relu would save its result
    "ipo": lambda pairs: (pairs.margins - 1 / (2 * pairs.beta)).square(),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda pairs: -logsigmoid(pairs.beta * pairs.chosen) - logsigmoid(-pairs.beta * pairs.rejected),
    "sppo_hard": lambda pairs: (
        (pairs.chosen - 0.5 / pairs.beta).square() + (pairs.rejected + 0.5 / pairs.beta).square()
    ),
    "apo_zero": lambda pairs: torch.sigmoid(-pairs.beta * pairs.chosen) + torch.sigmoid(pairs.beta * pairs.rejected),
    "apo_down": lambda pairs: torch.sigmoid(pairs.beta * pairs.chosen) + torch.sigmoid(-pairs.beta * pairs.margins),
    "discopop": _discopop,
}
OF_MARGINS = ("sigmoid", "hinge", "ipo")
OF_REFERENCES = tuple(_FORMULAS)
_SMOOTHED = ("sigmoid", "robust", "exo_pair")


def loss_of_pairs(
    function: str, pairs: Pairs, loss_type: str, reduction: str, accepted: tuple[str, ...] = OF_MARGINS
) -> Tensor:
    """Check the options of a loss of pairs, and compute it."""
    check_choice(function, "loss_type", loss_type, accepted)
    check_number(function, "beta", pairs.beta, POSITIVE)
    _check_label_smoothing(function, pairs.label_smoothing, loss_type, accepted)
    check_number(function, "discopop_tau", pairs.discopop_tau, POSITIVE)
    if loss_type != "discopop" and pairs.discopop_tau != 0.05:
        raise ValueError(
            f"{function}: discopop_tau must be 0.05, the default, with loss_type {loss_type!r}, but it is"
            f" {pairs.discopop_tau}"
        )
    return reduce_losses(function, _FORMULAS[loss_type](pairs), reduction)


def _check_label_smoothing(function: str, label_smoothing: float, loss_type: str, accepted: tuple[str, ...]) -> None:
    value: float = check_number(function, "label_smoothing", label_smoothing, NON_NEGATIVE)
    if loss_type == "exo_pair" and not 0 < value < 0.5:
        raise ValueError(
            f"{function}: label_smoothing must be above 0 and below 0.5 with loss_type 'exo_pair', but it is"
            f" {label_smoothing}"
        )
    if value >= 0.5 or (value and loss_type not in _SMOOTHED):
        kinds = " or ".join(f'"{one}"' for one in _SMOOTHED if one in accepted)
        raise ValueError(
            f"{function}: label_smoothing must be at least 0 and below 0.5, and 0 unless loss_type is {kinds}, but it"
            f" is {label_smoothing} with {loss_type!r}"
        )


def reduce_losses(function: str, losses: Tensor, reduction: str) -> Tensor:
    """Check the reduction, and reduce losses by it."""
    check_choice(function, "reduction", reduction, ("none", "mean", "sum"))
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
