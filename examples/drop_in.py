"""Twenty lines with an embedding, three losses and the optimizer of this package: a model that predicts the README.

Run ``python examples/drop_in.py`` from a checkout; it trains on an NPU where there is one, real or simulated.
"""

from pathlib import Path

import torch_aclnn_ops
from torch_aclnn_ops import functional as F  # instead of torch.nn.functional
from torch_aclnn_ops import optim  # instead of torch.optim

import torch
from torch import Tensor, nn

STEPS, BATCH_SIZE, CONTEXT, WIDTH = 200, 64, 8, 192
torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
text = torch.tensor(list(Path(__file__).parents[1].joinpath("README.md").read_bytes()), device=device)
is_letter = torch.tensor([float(chr(byte).isalpha()) for byte in range(256)], device=device)

# The twenty lines.
table = nn.Parameter(torch.randn(256, 32, device=device))
body = nn.Sequential(nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH)).to(device)
head, others = nn.Linear(WIDTH, 256, bias=False, device=device), nn.Linear(WIDTH, 2, device=device)
parameters = [table, *body.parameters(), *head.parameters(), *others.parameters()]
optimizer = optim.FusedEmaAdam(parameters, lr=1e-2, ema_decay=0.95)  # AdamW, and an EMA of the weights


def losses_at(starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the byte behind each context, its number, and whether it is a letter."""
    byte = text[starts + CONTEXT]
    with torch.autocast(device.type, torch.bfloat16):  # CANN's operators for a cross entropy are for 16 bits
        hidden = body(F.embedding(text[starts[:, None] + torch.arange(CONTEXT, device=device)], table))
        cross_entropy = F.linear_cross_entropy(hidden, head.weight, byte)
        number, letter = others(hidden).float().unbind(1)
    return cross_entropy, F.mse_loss(number, byte / 255), F.binary_cross_entropy(letter.sigmoid(), is_letter[byte])


for _ in range(STEPS):
    optimizer.zero_grad()
    sum(losses_at(torch.randint(len(text) - CONTEXT, (BATCH_SIZE,)).to(device))).backward()
    optimizer.step()
# That was it.

with torch.no_grad():
    everywhere = torch.arange(len(text) - CONTEXT, device=device)
    raw = losses_at(everywhere)[0].item()
    with optimizer.swap_ema_params():
        averaged = losses_at(everywhere)[0].item()
frequencies = text.cpu().bincount() / len(text)
by_frequency = -torch.special.xlogy(frequencies, frequencies).sum().item()
launched = sum(torch_aclnn_ops.launches().values())
print(
    f"Shown: {STEPS} steps on {device.type} bring the loss from {by_frequency:.2f} nats a byte, which frequencies alone"
    f" give, to {raw:.2f}, and to {averaged:.2f} with EMA weights.\nThe functions are called as torch's own are;"
    f" {launched:,} operators of CANN were launched."
)
