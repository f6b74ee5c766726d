"""Lightning's Trainer with an accelerator defined by the program: ``lightning_module.py cpu|npu``."""

import sys
import tempfile

import lightning
import torch
from _model import STEPS, model, rows, say
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy


class Npu(Accelerator):
    """The NPU, which Lightning does not support."""

    def setup_device(self, device):
        torch.npu.set_device(device)

    def teardown(self):
        torch.npu.empty_cache()

    @staticmethod
    def parse_devices(devices):
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("npu", index) for index in devices]

    @staticmethod
    def auto_device_count():
        return torch.npu.device_count()

    @staticmethod
    def is_available():
        return torch.npu.is_available()

    @staticmethod
    def name():
        return "npu"

    def get_device_stats(self, device):
        return torch.npu.memory_stats(device)


class Module(lightning.LightningModule):
    """The language model, which records its losses."""

    def __init__(self):
        super().__init__()
        self.model = model()
        self.losses = []

    def training_step(self, batch):
        loss = self.model(batch, labels=batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch):
        self.log("evaluated", self.model(batch, labels=batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def trainer(folder, epochs):
    """Return a trainer for this number of epochs, which writes a checkpoint after each."""
    if device == "npu":
        strategy = SingleDeviceStrategy(torch.device("npu", 0), accelerator=Npu())
    else:
        strategy = SingleDeviceStrategy(torch.device("cpu"), accelerator=CPUAccelerator())
    return lightning.Trainer(
        strategy=strategy, max_epochs=epochs, gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, save_last=True)], default_root_dir=folder, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip


device = sys.argv[1]
batches = torch.utils.data.DataLoader(rows(), batch_size=4)
with tempfile.TemporaryDirectory() as folder:
    first, second = Module(), Module()
    trainer(folder, 1).fit(first, batches, batches)
    again = trainer(folder, 2)
    # The second epoch resumes from the checkpoint, as after a restart.
    again.fit(second, batches, batches, ckpt_path=f"{folder}/last.ckpt")
    assert again.strategy.root_device.type == device, again.strategy.root_device
assert len(first.losses) == len(second.losses) == STEPS
say([*first.losses, *second.losses, again.callback_metrics["evaluated"]])
