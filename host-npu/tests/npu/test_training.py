"""A small model trains on an NPU as on the CPU, with any settings of torch_npu."""

import host_npu
import pytest
import torch
from tests._process import on_npu
from torch import nn

_SEGMENTS = "expandable segments"
_SETTINGS = {
    "no queue": {"TASK_QUEUE_ENABLE": "0"},
    "a queue": {"TASK_QUEUE_ENABLE": "1"},
    "a queue for both phases": {"TASK_QUEUE_ENABLE": "2"},
    "blocking launches": {"ASCEND_LAUNCH_BLOCKING": "1"},
    _SEGMENTS: {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
}


class _Model(nn.Module):
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


def _losses(device: str, steps: int = 12) -> list[float]:
    """Return the losses of a training run with a fixed seed."""
    torch.manual_seed(0)
    model = _Model()
    # Consecutive numbers from a random start can be learned.
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


def _trained() -> tuple[list[float], list[float], bool]:
    torch.set_num_threads(1)
    host_npu.count_calls()
    found = _losses("npu")
    return found, _losses("cpu"), "aclrtReserveMemAddress" in host_npu.stats().calls


@pytest.mark.parametrize("settings", _SETTINGS)
def test_training_has_the_cpus_losses_bit_for_bit_with(settings):
    found, expected, has_segments = on_npu(_trained, **_SETTINGS[settings])
    assert found == expected
    assert expected[-1] < expected[0]
    assert has_segments == (settings == _SEGMENTS)
