"""Train an autoencoder of scikit-learn's digits with Lightning, and validate and checkpoint averaged weights.

Run ``python examples/lightning_digits.py`` from a checkout, with ``pip install "lightning>=2.6"``; ``--resume`` goes on
from the checkpoint.
"""

import argparse
import sys
from pathlib import Path

from torch_aclnn_ops import functional as F
from torch_aclnn_ops.integrations.lightning import EmaCallback
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from digits import BATCH_SIZE, load_split, whole_number_from
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(LightningModule):
    """Squeezes images through 12 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 12), nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 64)
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the error of the reconstruction."""
        [images] = batch
        return F.mse_loss(self.layers(images), images)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the error, which is that of the averaged weights."""
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> FusedEmaAdam:
        """Return the optimizer, which averages the weights."""
        return FusedEmaAdam(self.parameters(), lr=2e-3, ema_decay=0.99, ema_warmup="ratio")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 if the model beats drawing the mean image."""
    parser = argparse.ArgumentParser(description="Train an autoencoder of digits with Lightning.")
    parser.add_argument("--output", type=Path, default=Path("runs/lightning_digits"), help="(default: %(default)s)")
    parser.add_argument("--epochs", type=whole_number_from(1), default=20, help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the output folder")
    options = parser.parse_args(argv)
    seed_everything(0)
    training, held_out = (digits.images for digits in load_split(0, torch.device("cpu")))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        callbacks=[EmaCallback(), ModelCheckpoint(options.output, "best", monitor="val_loss", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Autoencoder(),
        DataLoader(TensorDataset(training), BATCH_SIZE, shuffle=True),
        DataLoader(TensorDataset(held_out), BATCH_SIZE),
        ckpt_path=options.output / "last.ckpt" if options.resume else None,
    )
    error = float(trainer.callback_metrics["val_loss"])
    baseline = F.mse_loss(training.mean(0).expand_as(held_out), held_out).item()
    if not error < baseline:
        print(f"error: reconstruction error {error:.4f}, mean image {baseline:.4f}", file=sys.stderr)
        return 1
    print(
        "Shown: Lightning validates averaged weights and saves them in its checkpoints:"
        f"\nreconstruction error {error:.4f} with averaged weights, {baseline:.4f} for the mean image."
    )
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
