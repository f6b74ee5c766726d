"""Train a small model on the CPU and on an NPU, and print the losses of both; run by test_enable.py."""

import json

import torch
from torch import nn


class Model(nn.Module):
    """An embedding, a block and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 32)
        self.output = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens."""
        return self.output(nn.functional.gelu(self.hidden(self.norm(self.embedding(tokens)))))


def losses(device: str, steps: int = 12) -> list[float]:
    """Return the losses of a training run from one seed."""
    torch.manual_seed(0)
    model = Model()
    # Counting on from random numbers can be learnt.
    tokens = (torch.randint(0, 50, (steps, 4, 1)) + torch.arange(9)) % 50
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    values = []
    for batch in tokens:
        batch = batch.to(device)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({device: losses(device) for device in ("cpu", "npu")}))
