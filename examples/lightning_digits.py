"""Train an autoencoder of scikit-learn's digits with Lightning, and validate and checkpoint EMA weights.

Run ``python examples/lightning_digits.py`` from a checkout, with ``pip install "lightning>=2.6"``; ``--resume``
continues from the checkpoint. Lightning does not support NPUs; for ``--device npu`` this file defines an accelerator.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch_aclnn_ops import functional as F
from torch_aclnn_ops.integrations.lightning import EmaCallback
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from arguments import whole_number_from
from devices import DEVICES, DeviceUnavailableError, open_device
from digits import BATCH_SIZE, load_split
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(LightningModule):
    """Compresses images to 12 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 12), nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 64)
        )

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the reconstruction error."""
        [images] = batch
        return F.mse_loss(self.layers(images), images)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the reconstruction error with the EMA weights."""
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> FusedEmaAdam:
        """Return the optimizer, which averages the weights."""
        return FusedEmaAdam(self.parameters(), lr=2e-3, ema_decay=0.99, ema_warmup="ratio")


class NpuAccelerator(Accelerator):
    """The interface through which Lightning trains on an NPU."""

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        """Return the indices of the first ``devices`` NPUs."""
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the NPUs with these indices."""
        return [torch.device("npu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of NPUs."""
        return int(torch.npu.device_count())

    @staticmethod
    def is_available() -> bool:
        """Return whether there is an NPU."""
        return bool(torch.npu.is_available())

    @staticmethod
    def name() -> str:
        """Return Lightning's name of the accelerator."""
        return "npu"

    def setup_device(self, device: torch.device) -> None:
        """Make a device current."""
        torch.npu.set_device(device)

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the allocator's statistics."""
        return dict(torch.npu.memory_stats(device))

    def teardown(self) -> None:
        """Free the allocator's cached memory."""
        torch.npu.empty_cache()


def place(device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``Trainer`` for a device.

    On an NPU, Trainer's ``precision="bf16-mixed"`` would be CUDA's and have no effect; the plugin
    ``MixedPrecision("bf16-mixed", device="npu")`` enables bfloat16.
    """
    if device.type == "cpu":
        return {"accelerator": "cpu"}
    return {"strategy": SingleDeviceStrategy(torch.device("npu", 0), NpuAccelerator())}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 if the model beats drawing the mean image."""
    parser = argparse.ArgumentParser(description="Train an autoencoder of digits with Lightning.")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to train (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/lightning_digits"), help="(default: %(default)s)")
    parser.add_argument("--epochs", type=whole_number_from(1), default=20, help="(default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the output folder")
    options = parser.parse_args(argv)
    try:
        device = open_device(options.device)
    except DeviceUnavailableError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    seed_everything(0)
    training, held_out = (digits.images for digits in load_split(0, torch.device("cpu")))
    trainer = Trainer(
        **place(device),
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
    if "val_loss" not in trainer.callback_metrics:
        parser.exit(2, f"{parser.prog}: error: the checkpoint has all {options.epochs} epochs; ask for more\n")
    error = float(trainer.callback_metrics["val_loss"])
    baseline = F.mse_loss(training.mean(0).expand_as(held_out), held_out).item()
    if not error < baseline:
        print(f"error: reconstruction error {error:.4f}, mean image {baseline:.4f}", file=sys.stderr)
        return 1
    print(
        "Shown: Lightning validates EMA weights and saves them in its checkpoints:"
        f"\nreconstruction error {error:.4f} with EMA weights, {baseline:.4f} for the mean image."
    )
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
