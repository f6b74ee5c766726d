"""Training a language model: the settings, the training itself, and its checkpoint."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from atomic_save import save_atomically
from devices import open_device, synchronize
from text_data import VOCABULARY_SIZE, TextData, evenly_spaced_batches, random_batch, token_properties
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformer import Transformer

DTYPES = ("float32", "bfloat16")
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LARGEST_GRADIENT_NORM = 1.0
WARM_UP_STEPS = 50
LAST_LEARNING_RATE_FRACTION = 0.2
VALIDATION_WINDOWS = 128
# The weight of the losses of a token's properties relative to the loss of the token.
PROPERTIES_WEIGHT = 0.1


@dataclass(frozen=True)
class Settings:
    """Everything that the numbers of a training run depend on, apart from the text."""

    device: str = "cpu"
    dtype: str = "float32"
    steps: int = 900
    batch_size: int = 8
    context: int = 128
    layers: int = 3
    width: int = 192
    heads: int = 6
    lr: float = 3e-3
    ema_decay: float = 0.98
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.width % (2 * self.heads):
            raise SettingsError(f"width must be a multiple of twice heads, which is {2 * self.heads}, got {self.width}")


class SettingsError(ValueError):
    """Raised when settings are inconsistent with each other or with the text."""


class CheckpointError(RuntimeError):
    """Raised when training cannot continue from a checkpoint."""


class Trainer:
    """Trains the transformer with this package's embedding, losses and optimizer."""

    # Replacements of this package's operators.
    operators: Mapping[str, Any] = {}
    model_type = Transformer

    def __init__(self, settings: Settings, data: TextData) -> None:
        self.settings = settings
        self.data = data
        shortest = min(len(data.training), len(data.validation))
        if settings.context >= shortest:
            raise SettingsError(f"context must be below {shortest}, the tokens of text, got {settings.context}")
        self.device = open_device(settings.device)
        # The weights are drawn on the CPU, so that they are the same on every device.
        torch.manual_seed(settings.seed)
        self.model = self.build_model().to(self.device)
        self.optimizer = self.build_optimizer(weight_decay_groups(self.model))
        self.scheduler = LambdaLR(self.optimizer, partial(learning_rate_fraction, steps=settings.steps))
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.properties = token_properties(data.tokenizer)
        self.losses: list[float] = []
        self.validation_losses: dict[int, tuple[float, float]] = {}
        self.training_seconds = 0.0

    def build_model(self) -> Transformer:
        """Return a new model."""
        return self.model_type(
            vocabulary_size=VOCABULARY_SIZE,
            context=self.settings.context,
            layers=self.settings.layers,
            width=self.settings.width,
            heads=self.settings.heads,
            **self.operators,
        )

    def build_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer that also averages the weights."""
        return FusedEmaAdam(groups, lr=self.settings.lr, betas=BETAS, ema_decay=self.settings.ema_decay)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model holds the EMA weights."""
        assert isinstance(self.optimizer, FusedEmaAdam)
        return self.optimizer.swap_ema_params()

    @property
    def step(self) -> int:
        """The number of steps done."""
        return len(self.losses)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of one batch: of the tokens, and of their properties."""
        batch = (tensor.to(self.device) for tensor in (inputs, targets, self.properties[targets]))
        # Weights stay float32: most updates by EMA and Adam are too small to survive rounding to bfloat16.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            losses: tuple[torch.Tensor, torch.Tensor] = self.model(*batch)
        return losses

    def train_step(self) -> float:
        """Draw a batch, update the weights, and return the loss before the update."""
        started = time.perf_counter()
        inputs, targets = random_batch(
            self.data.training, self.settings.batch_size, self.settings.context, self.generator
        )
        self.optimizer.zero_grad()
        loss, properties_loss = self.loss(inputs, targets)
        (loss + PROPERTIES_WEIGHT * properties_loss).backward()
        self.clip_gradients()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())
        synchronize(self.device)
        self.training_seconds += time.perf_counter() - started
        return self.losses[-1]

    def clip_gradients(self) -> None:
        """Scale the gradients down if their norm is too large."""
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files, if there are several."""
        return True

    def agree(self, decision: bool) -> bool:
        """Return the decision of the process that writes the files."""
        return decision

    def validate(self) -> tuple[float, float]:
        """Return the validation losses of the raw and the EMA weights, and record them for the report."""
        raw = self.validation_loss()
        with self.ema_weights():
            averaged = self.validation_loss()
        self.validation_losses[self.step] = (raw, averaged)
        return raw, averaged

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss of the current model over windows of the validation text."""
        batches = evenly_spaced_batches(
            self.data.validation, self.settings.batch_size, self.settings.context, VALIDATION_WINDOWS
        )
        return sum(self.loss(*batch)[0].item() * len(batch[0]) for batch in batches) / VALIDATION_WINDOWS

    def save(self, path: Path) -> None:
        """Write a checkpoint from which ``load`` continues bit for bit."""
        contents = self.contents()
        if self.is_first:
            save_atomically(contents, path)

    def contents(self) -> dict[str, Any]:
        """Return a checkpoint's contents."""
        return {
            "settings": asdict(self.settings),
            "text": self.data.fingerprint,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "generator": self.generator.get_state(),
            "losses": self.losses,
            "validation_losses": self.validation_losses,
        }

    def load(self, path: Path) -> None:
        """Continue from a checkpoint with the same settings and text."""
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint {path} to resume from")
        contents = torch.load(path, map_location="cpu", weights_only=True)
        for name, value in asdict(self.settings).items():
            saved = contents["settings"].get(name)
            if saved != value:
                raise CheckpointError(
                    f"the checkpoint {path} was made with {name} = {saved}, and this run has {name} = {value}: "
                    "resume with the same value, or start anew without --resume"
                )
        if contents["text"] != self.data.fingerprint:
            raise CheckpointError(
                f"the checkpoint {path} was made from text {contents['text'][:16]}, and this run's text is "
                f"{self.data.fingerprint[:16]}: resume with the same Python and tokenizers, or start anew"
            )
        self.restore(contents)

    def restore(self, contents: dict[str, Any]) -> None:
        """Continue from a checkpoint's contents."""
        self.model.load_state_dict(contents["model"])
        self.optimizer.load_state_dict(contents["optimizer"])
        self.scheduler.load_state_dict(contents["scheduler"])
        self.generator.set_state(contents["generator"])
        self.losses = contents["losses"]
        self.validation_losses = contents["validation_losses"]


def weight_decay_groups(model: Transformer) -> list[dict[str, Any]]:
    """Split the parameters into matrices, which get weight decay, and norms and embeddings, which do not."""
    decayed = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.startswith("embedding.")
    ]
    decayed_ids = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in model.parameters() if id(parameter) not in decayed_ids]
    return [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def learning_rate_fraction(step: int, steps: int) -> float:
    """Return the fraction of the full learning rate at ``step`` of ``steps``: a linear warm-up times half a cosine."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return rise * (LAST_LEARNING_RATE_FRACTION + (1 - LAST_LEARNING_RATE_FRACTION) * cosine)
