"""Train a small language model whose weights, head and EMA weights ``fully_shard`` (FSDP2) shards over processes.

Run ``torchrun --nproc-per-node 2 examples/fsdp2.py``, or on simulated NPUs ``torchrun --nproc-per-node 2 -m host_npu
examples/fsdp2.py --device npu``; ``--help`` lists the options. Every process draws its own batches. The loss is
computed outside of the model's forward pass, without the logits, and gets the shards through ``fsdp_module``; the EMA
weights are sharded like the weights.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn as aclnn
from torch_aclnn_ops.optim import FusedEmaAdam

import torch
import torch.distributed as dist
from devices import DEVICES, DeviceUnavailableError
from processes import NoProcessesError, first_process_first, processes
from text_data import VOCABULARY_SIZE, TextData, evenly_spaced_batches, load_text_data, random_batch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformer import INITIAL_STANDARD_DEVIATION, Block

BATCH_SIZE, CONTEXT, LAYERS, HEADS = 8, 64, 2, 4
LEARNING_RATE = 5e-3
VALIDATION_WINDOWS = 64


class LanguageModel(nn.Module):
    """A decoder-only transformer whose forward pass ends before its head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = aclnn.Embedding(VOCABULARY_SIZE, width)
        self.blocks = nn.ModuleList(Block(width, HEADS, CONTEXT) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=INITIAL_STANDARD_DEVIATION)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last layer's output, of shape (batch, positions, width)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return hidden


def sharded_model(width: int, device: str) -> LanguageModel:
    """Return a model that is sharded over the processes: each block, the head, and the rest."""
    torch.manual_seed(0)
    model = LanguageModel(width).to(device)
    for module in (*model.blocks, model.head, model):
        # Without reshard_after_forward, the root module keeps its unsharded weights after an evaluation.
        fully_shard(module, reshard_after_forward=True)
    return model


def loss_of(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a batch; FSDP2 gathers the head for it, and reduces its gradient."""
    hidden = model(inputs).flatten(0, 1)
    loss: Tensor = F.linear_cross_entropy(hidden, model.head.weight, targets.flatten(), fsdp_module=model)
    return loss


def train(model: LanguageModel, optimizer: FusedEmaAdam, data: TextData, steps: int, device: str) -> None:
    """Train on batches that differ from process to process, whose gradients FSDP2 averages."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        batch = random_batch(data.training, BATCH_SIZE, CONTEXT, generator)
        optimizer.zero_grad()
        loss_of(model, *(tensor.to(device) for tensor in batch)).backward()
        optimizer.step()


@torch.no_grad()
def validation_loss(model: LanguageModel, data: TextData, device: str) -> float:
    """Return the mean loss over windows of the validation text, which the processes share."""
    batches = evenly_spaced_batches(data.validation, BATCH_SIZE, CONTEXT, VALIDATION_WINDOWS)
    share = batches[dist.get_rank() :: dist.get_world_size()]
    total = torch.stack([loss_of(model, *(tensor.to(device) for tensor in batch)) for batch in share]).sum()
    dist.all_reduce(total)
    return total.item() / len(batches)


def run(arguments: argparse.Namespace) -> bool:
    """Train, print the results, and return whether they are as expected."""
    data = first_process_first(partial(load_text_data, arguments.output / "cache"))
    model = sharded_model(arguments.width, arguments.device)
    optimizer = FusedEmaAdam(model.parameters(), lr=LEARNING_RATE, ema_decay=0.9)
    losses = partial(validation_loss, model, data, arguments.device)
    before = losses()
    train(model, optimizer, data, arguments.steps, arguments.device)
    after = losses()
    with optimizer.swap_ema_params():
        averaged = losses()
    are_back = losses() == after
    if dist.get_rank() == 0:
        whole = sum(parameter.numel() for parameter in model.parameters())
        weights = [parameter.to_local() for parameter in model.parameters()]
        averages = [optimizer.state[parameter]["ema_params"].to_local() for parameter in model.parameters()]
        print(
            f"{dist.get_world_size()} processes with {arguments.device}s, connected by {dist.get_backend()}; the first"
            f" one has {sum(map(torch.numel, weights)):,} of {whole:,} weights, and"
            f" {sum(map(torch.numel, averages)):,} of their EMA weights"
        )
        print(
            f"Shown: {arguments.steps} steps bring the validation loss from {before:.3f} to {after:.3f}, with EMA"
            f" weights {averaged:.3f}; after the swap the weights are {'what they were' if are_back else 'others'}."
        )
    return are_back and after < before and averaged < before


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 if the model has learned and its weights have been restored."""
    parser = argparse.ArgumentParser(description="Train a language model that FSDP2 has sharded.")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps of the optimizer (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="channels, a multiple of 8 (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/fsdp2"), help="where the tokens are kept")
    arguments = parser.parse_args(argv)
    try:
        with processes(arguments.device):
            return 0 if run(arguments) else 1
    except (DeviceUnavailableError, NoProcessesError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
