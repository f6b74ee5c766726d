"""The training in one process with torch's AdamW with which test_optimizer_matrix.py compares every cell."""

from typing import Any

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)

import torch
from torch import Tensor, nn

STEPS, HALF = 6, 3
BATCH = 12  # divisible by 2 and 3 processes
# With eps=1, an update is no more sensitive to rounding of the gradient than an update of SGD.
OPTIONS: dict[str, Any] = {"lr": 0.1, "eps": 1.0, "weight_decay": 0.1}
EMA_DECAY = 0.6
UNTIED = "tied by storage, and untied since"


class Model(nn.Module):
    """Layers, two of which can share a weight, and one of which has a number of rows that cannot be shared evenly."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(input)))
        return self.out(torch.tanh(self.b(torch.tanh(self.a(hidden)))))


def make_model(feature: str, device: str = "cpu", seed: int = 0) -> Model:
    """Return a model as in a single process."""
    dtype = torch.bfloat16 if feature == "bfloat16 with masters" else torch.float32
    model = Model(seed).to(device, dtype)
    if feature == "tied by module":
        model.b.weight = model.a.weight
    if feature in ("tied by storage", UNTIED):
        data = model.a.weight.data
        model.b.weight.data = data if feature == "tied by storage" else data.clone()
    if feature == "frozen in part":
        model.up.bias.requires_grad_(False)
    return model


def batch_of(step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(BATCH, 6 + 5, generator=generator).to(device)
    return batch[:, :6], batch[:, 6:]


def loss_of(model: nn.Module, input: Tensor, target: Tensor) -> Tensor:
    """Return a loss with gradients of about 1."""
    dtype = next(model.parameters()).dtype
    return 4 * (model(input.to(dtype)).float() - 3 * target).square().mean()


def is_skipped(feature: str, step: int) -> bool:
    """Return whether a scaled gradient overflows in this step."""
    return feature == "GradScaler" and step == 1


def lr_at(feature: str, step: int) -> float:
    """Return the learning rate; as a tensor, it is halved."""
    return OPTIONS["lr"] / 2 if feature == "tensor lr" and step >= 2 else OPTIONS["lr"]


def names_without_gradient(feature: str, step: int) -> tuple[str, ...]:
    """Return the parameters that are trained at first and later get no gradient."""
    return ("a.bias",) if feature == "frozen in part" and step >= 4 else ()


def reference(feature: str, steps: int = STEPS) -> dict[str, dict[str, Tensor]]:
    """Train in one process with torch's AdamW on float32 weights, and average them by hand."""
    model = make_model(feature)
    params = dict(model.named_parameters())
    weights = {name: nn.Parameter(param.detach().float()) for name, param in params.items()}
    averages = {name: weight.detach().clone() for name, weight in weights.items()}
    adamw = torch.optim.AdamW(weights.values(), **OPTIONS)
    done = 0
    for step in range(steps):
        loss_of(model, *batch_of(step)).backward()
        for name, param in params.items():
            weights[name].grad = None if name in names_without_gradient(feature, step) else widened(param.grad)
            param.grad = None
        if is_skipped(feature, step):
            continue
        adamw.param_groups[0]["lr"] = lr_at(feature, step)
        adamw.step()
        done += 1
        with torch.no_grad():
            decay = min(EMA_DECAY, (1 + done) / (10 + done))
            for name, weight in weights.items():
                averages[name] = decay * averages[name] + (1 - decay) * weight
                params[name].copy_(weight)
    found = {"weights": params, "masters": weights, "averages": averages}
    return {kind: {name: each.detach() for name, each in tensors.items()} for kind, tensors in found.items()}


def widened(grad: Tensor | None) -> Tensor | None:
    """Return a gradient in float32, if there is one."""
    return None if grad is None else grad.float()


def outputs(feature: str) -> dict[str, Tensor]:
    """Return one process's outputs for that batch: with averages midway, with weights and averages at the end."""
    model, midway, end = make_model(feature), reference(feature, HALF), reference(feature)
    found = {}
    for name, tensors in (
        ("averages midway", midway["averages"]),
        ("weights", end["weights"]),
        ("averages", end["averages"]),
        ("weights again", end["weights"]),
    ):
        model.load_state_dict(tensors, strict=False)
        found[name] = output_of(model)
    return found


def output_of(model: nn.Module, device: str = "cpu") -> Tensor:
    """Return a model's output for a batch outside of the training."""
    with torch.no_grad():
        return model(batch_of(STEPS, device)[0].to(next(model.parameters()).dtype)).float()
