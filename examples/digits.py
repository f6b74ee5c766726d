"""Train an autoencoder and a multi-label classifier on scikit-learn's handwritten digits.

Run ``python examples/digits.py`` from a checkout; it takes some seconds and downloads nothing.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch_aclnn_ops import functional as F
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
from arguments import whole_number_from
from devices import DEVICES, DeviceUnavailableError, open_device
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import trange

BATCH_SIZE = 128
HELD_OUT_FRACTION = 0.25
LABELS = {"even": {0, 2, 4, 6, 8}, "prime": {2, 3, 5, 7}, "above 4": {5, 6, 7, 8, 9}, "closed loop": {0, 6, 8, 9}}


@dataclass(frozen=True)
class Digits:
    """Images with pixels from 0 to 1, and for each image which of ``LABELS`` apply."""

    images: Tensor
    labels: Tensor


def load_split(seed: int, device: torch.device) -> tuple[Digits, Digits]:
    """Return the digits to train on and those held out."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    labels = torch.tensor([[float(digit in members) for members in LABELS.values()] for digit in digits])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out, training = order.tensor_split([round(HELD_OUT_FRACTION * len(order))])
    return (
        Digits(images[training].to(device), labels[training].to(device)),
        Digits(images[held_out].to(device), labels[held_out].to(device)),
    )


def train(
    model: nn.Module, digits: Digits, loss_of: Callable[[Digits], Tensor], epochs: int, name: str
) -> FusedEmaAdam:
    """Minimise ``loss_of`` a batch of ``digits``, and return the optimizer, which has the EMA weights."""
    optimizer = FusedEmaAdam(model.parameters(), lr=2e-3, weight_decay=1e-4, ema_decay=0.99)
    for _ in trange(epochs, desc=name, unit="epoch"):
        # Drawn on the CPU, so that a seed gives the same batches on every device.
        for rows in torch.randperm(len(digits.images)).to(digits.images.device).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss_of(Digits(digits.images[rows], digits.labels[rows])).backward()
            optimizer.step()
    return optimizer


def autoencode(training: Digits, held_out: Digits, epochs: int) -> bool:
    """Compress the images to 12 numbers, and return whether that beats drawing the mean image."""
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 12), nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 64)
    ).to(training.images.device)

    def loss_of(digits: Digits) -> Tensor:
        return F.mse_loss(model(digits.images), digits.images)

    optimizer = train(model, training, loss_of, epochs, "autoencoder")
    with torch.no_grad(), optimizer.swap_ema_params():
        error = loss_of(held_out).item()
    mean_image = training.images.mean(0).expand_as(held_out.images)
    baseline = F.mse_loss(mean_image, held_out.images).item()
    print(f"reconstruction error  {error:.4f}, mean image {baseline:.4f}")
    return error < baseline


def classify(training: Digits, held_out: Digits, epochs: int) -> bool:
    """Predict each label separately, and return whether all predictions beat the more common value."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, len(LABELS)), nn.Sigmoid())
    model.to(training.images.device)

    def loss_of(digits: Digits) -> Tensor:
        return F.binary_cross_entropy(model(digits.images), digits.labels)

    optimizer = train(model, training, loss_of, epochs, "classifier")
    with torch.no_grad(), optimizer.swap_ema_params():
        correct = (model(held_out.images) > 0.5) == (held_out.labels > 0.5)
    accuracies = correct.float().mean(0)
    commoner = training.labels.mean(0).round()
    baselines = (held_out.labels == commoner).float().mean(0)
    for label, accuracy, baseline in zip(LABELS, accuracies.tolist(), baselines.tolist(), strict=True):
        print(f"accuracy of {label:<12} {accuracy:.1%}, always the commoner value {baseline:.1%}")
    return bool((accuracies > baselines).all())


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 if both models beat their baselines."""
    parser = argparse.ArgumentParser(description="Train two small models on scikit-learn's digits.")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to train (default: %(default)s)")
    epochs, seed = whole_number_from(1), whole_number_from(0)
    parser.add_argument("--epochs", type=epochs, default=60, help="passes over the images (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of split, weights and order (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        device = open_device(arguments.device)
    except DeviceUnavailableError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    torch.manual_seed(arguments.seed)
    training, held_out = load_split(arguments.seed, device)
    beaten = [autoencode(training, held_out, arguments.epochs), classify(training, held_out, arguments.epochs)]
    if not all(beaten):
        print("error: a model is no better than its baseline", file=sys.stderr)
        return 1
    print(
        "Shown: mse_loss, binary_cross_entropy and FusedEmaAdam take the places of torch's; on digits that were held"
        " out\nboth models, with EMA weights, are better than guesses that look at no image."
    )
    return 0


if __name__ == "__main__":
    # These models are so small that threads would mostly wait for one another.
    torch.set_num_threads(1)
    sys.exit(main())
