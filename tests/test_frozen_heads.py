"""A frozen head with trained adapters: its loss needs neither the logits nor a gradient or a copy of the head."""

from torch_aclnn_ops.integrations import _lazy_heads
from torch_aclnn_ops.integrations._materializations import Materializations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests._modes import Largest

ROWS, FEATURES, RANK, CLASSES = 48, 32, 4, 300
TARGET = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(0))
TARGET[5:9] = 7


def _layers(dtype, is_patched, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, CLASSES), nn.Linear(RANK, CLASSES, bias=False)]
    for layer in layers:
        layer.to(dtype)
        if is_patched:
            _lazy_heads.patch(layer, {"chunk_size": 7, "max_memory": None, **options}, Materializations(is_seen=True))
    layers[0].requires_grad_(False)
    return layers


def _gradients(loss, dtype=torch.float64, is_patched=True, **options):
    """Return a loss, its gradients for both inputs and the adapter, and the elements of the largest tensor."""
    head, adapter = _layers(dtype, is_patched, **options)
    inputs = [torch.randn(ROWS, size, dtype=dtype).requires_grad_() for size in (FEATURES, RANK)]
    with Largest() as largest:
        value = loss(head(inputs[0]) / 2 + adapter(inputs[1]) * 3.0)
        made = torch.autograd.grad(value.sum(), [*inputs, adapter.weight])
    assert head.weight.grad is None
    return [value.detach(), *made], largest.elements


WEIGHT = torch.linspace(0, 2, CLASSES, dtype=torch.float64)
LOSSES = {
    "mean": lambda logits: cross_entropy(logits, TARGET),
    "sum": lambda logits: cross_entropy(logits, TARGET, reduction="sum"),
    "none": lambda logits: cross_entropy(logits, TARGET, reduction="none") * torch.arange(ROWS),
    "ignored targets": lambda logits: cross_entropy(logits, TARGET, ignore_index=7),
    "smoothed": lambda logits: cross_entropy(logits, TARGET, label_smoothing=0.2, ignore_index=7),
    "class weights": lambda logits: cross_entropy(logits, TARGET, weight=WEIGHT, ignore_index=7),
    "weighted, smoothed": lambda logits: cross_entropy(logits, TARGET, weight=WEIGHT, label_smoothing=0.2),
    "a softcap": lambda logits: cross_entropy(torch.tanh(logits / 1.5) * 1.5, TARGET),
    "a vector": lambda logits: cross_entropy((logits + WEIGHT) / 3, TARGET),
    "log-probabilities": lambda logits: logits.log_softmax(-1).gather(-1, TARGET[:, None]).sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_loss_and_its_gradients_are_those_of_the_logits(loss):
    (found, largest), (expected, _) = _gradients(loss), _gradients(loss, is_patched=False)
    torch.testing.assert_close(found, expected)
    assert largest <= FEATURES * CLASSES  # a view of the head; with the adapter copied to it there would be more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_as_near_to_the_truth_as_the_logits_are(dtype):
    found, expected = (_gradients(LOSSES["mean"], dtype, is_patched, chunk_size=1)[0] for is_patched in (True, False))
    truth = [one.double() for one in _layers(dtype, False)]
    torch.manual_seed(0)
    _layers(dtype, False)
    inputs = [torch.randn(ROWS, size, dtype=dtype).double().requires_grad_() for size in (FEATURES, RANK)]
    loss = LOSSES["mean"](truth[0](inputs[0]) / 2 + truth[1](inputs[1]) * 3.0)
    wanted = [loss.detach(), *torch.autograd.grad(loss, [*inputs, truth[1].weight])]
    for one, other, right in zip(found, expected, wanted, strict=True):
        assert (one - right).square().mean().sqrt() <= 1.5 * (other - right).square().mean().sqrt() + 1e-6
    assert [one.dtype for one in found] == [one.dtype for one in expected]


def test_gradients_of_16_bits_are_added_in_float32():
    rows, found = 600, []  # 1 added to 256 is 256 in bfloat16
    for chunk_size in (1, rows):
        head, adapter = _layers(torch.bfloat16, True, chunk_size=chunk_size)
        head.bias.requires_grad_()
        vector = torch.zeros(CLASSES, dtype=torch.bfloat16, requires_grad=True)
        inputs = [torch.ones(rows, size, dtype=torch.bfloat16) for size in (FEATURES, RANK)]
        loss = cross_entropy(head(inputs[0]) + adapter(inputs[1]) + vector, torch.full((rows,), 7), reduction="sum")
        found.append(torch.autograd.grad(loss, [adapter.weight, head.bias, vector]))
    torch.testing.assert_close(*found)


def test_max_memory_chooses_the_rows_and_too_little_raises():
    enough = _gradients(LOSSES["mean"], chunk_size="auto", max_memory=2**17)
    assert enough[1] < ROWS * CLASSES
    with pytest.raises(ValueError, match="max_memory must be at least"):
        _gradients(LOSSES["mean"], chunk_size="auto", max_memory=8)
