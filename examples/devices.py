"""Choosing the device an example runs on."""

import importlib

import torch

DEVICES = ("cpu", "npu")


class DeviceUnavailableError(RuntimeError):
    """Raised when the requested device cannot be used on this machine."""


def open_device(name: str) -> torch.device:
    """Return the device ``name``, or raise an error with the missing requirement."""
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "npu":
        try:
            torch_npu = importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceUnavailableError(
                f"device 'npu' needs torch_npu and the CANN libraries, and torch_npu cannot be imported: {error}"
            ) from error
        if not torch_npu.npu.is_available():
            raise DeviceUnavailableError("device 'npu' needs an Ascend NPU and its driver, and torch_npu finds none")
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done the work queued on it, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
