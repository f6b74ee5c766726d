"""The same training with torch's operators and optimizer, and the tolerated difference of the losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from lm_training import BETAS, Trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformer import Transformer

# A loss of about 8 nats has an ulp of 8 epsilons.
TOLERATED_EPSILONS = 32
TOLERATED_CONTROL_DIFFERENCES = 20


def _linear_cross_entropy(input: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(nn.functional.linear(input, weight), target)


class ReferenceTrainer(Trainer):
    """Trains the transformer with torch's operators and optimizer."""

    operators = {
        "embedding_type": nn.Embedding,
        "linear_cross_entropy": _linear_cross_entropy,
        "mse_loss": nn.functional.mse_loss,
        "binary_cross_entropy": nn.functional.binary_cross_entropy,
    }

    def build_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return torch's AdamW, and average the weights separately."""
        averaging = get_ema_multi_avg_fn(self.settings.ema_decay)
        self.averaged_model = AveragedModel(self.model, multi_avg_fn=averaging)
        # AveragedModel copies the weights in its first update, so do that with the initial weights.
        self.averaged_model.update_parameters(self.model)
        return torch.optim.AdamW(groups, lr=self.settings.lr, betas=BETAS)

    def train_step(self) -> float:
        """Update the weights and their average, and return the loss before the update."""
        loss = super().train_step()
        self.averaged_model.update_parameters(self.model)
        return loss

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Temporarily replace the model by the averaged model."""
        model, averaged_model = self.model, self.averaged_model.module
        assert isinstance(averaged_model, Transformer)
        self.model = averaged_model
        try:
            yield
        finally:
            self.model = model


class ControlTrainer(ReferenceTrainer):
    """Trains like the reference, from differently rounded weights."""

    def build_model(self) -> Transformer:
        """Return a new model with about one rounding error in every weight."""
        model = super().build_model()
        generator = torch.Generator().manual_seed(self.settings.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + self.epsilon * torch.randn(parameter.shape, generator=generator))
        return model

    @property
    def epsilon(self) -> float:
        """The relative rounding error of the matrix products."""
        return torch.finfo(getattr(torch, self.settings.dtype)).eps


@dataclass(frozen=True)
class Comparison:
    """A run's losses next to those of its reference and of its control.

    Training amplifies rounding errors exponentially. The control measures by how much: it differs from the reference by
    rounding alone, so a correct run is about as far from the reference at every step.
    """

    losses: list[float]
    reference_losses: list[float]
    control_losses: list[float]
    ema_validation_loss: float
    reference_ema_validation_loss: float
    epsilon: float

    @property
    def differences(self) -> list[float]:
        """The run's distance from the reference, per step."""
        return distances(self.losses, self.reference_losses)

    @property
    def control_differences(self) -> list[float]:
        """The control's distance from the reference, per step."""
        return distances(self.control_losses, self.reference_losses)

    @property
    def is_within_rounding(self) -> bool:
        """Whether rounding explains the run's distance from the reference, at every step and of the EMA weights."""
        rounding = TOLERATED_EPSILONS * self.epsilon
        limits = [
            rounding + TOLERATED_CONTROL_DIFFERENCES * distance
            for distance in accumulate(self.control_differences, max)
        ]
        ema_difference = abs(self.ema_validation_loss - self.reference_ema_validation_loss)
        found = [*self.differences, ema_difference]
        return all(distance <= limit for distance, limit in zip(found, [*limits, limits[-1]], strict=True))


def distances(losses: list[float], others: list[float]) -> list[float]:
    """Return the absolute differences of two lists of losses."""
    return [abs(loss - other) for loss, other in zip(losses, others, strict=True)]
