"""Losses that a program computes itself, of the logits of a model that it called without labels."""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax
from transformers.trainer_pt_utils import LabelSmoother

from tests._language_models import CLASSES


def _flattened(output, labels):
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return cross_entropy(output["logits"].flatten(0, 1).float(), shifted.flatten(), label_smoothing=0.1)


def _masked(output, labels):
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return cross_entropy(output[0][shifted != -100], shifted[shifted != -100])


def _of_log_probabilities(output, labels):
    targets = labels[:, 1:].clamp(min=0)
    log_probs = log_softmax(output.logits[:, :-1], dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -(log_probs * (labels[:, 1:] != -100)).mean()


LOSSES = {
    "rows": lambda output, labels: cross_entropy(output.logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1)),
    "flattened": _flattened,
    "a mask": _masked,
    "log-probabilities": _of_log_probabilities,
    "label smoothing of transformers": partial(LabelSmoother(0.1), shift_labels=True),
}


class WithOwnLoss(nn.Module):
    """A model that is called without labels, and the loss of its output."""

    def __init__(self, model: nn.Module, loss: str = "rows") -> None:
        super().__init__()
        self.model = model
        self.loss = LOSSES[loss]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss alone."""
        return {"loss": self.loss(self.model(input_ids), labels)}
