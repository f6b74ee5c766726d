"""The loss of lazy logits is that of the head, frozen or not, and of the input as they were in the forward pass."""

from functools import partial

from torch_aclnn_ops.integrations import _lazy_heads, _logit_sums
from torch_aclnn_ops.integrations import transformers as integration
from torch_aclnn_ops.integrations._materializations import Materializations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

from tests._language_models import make
from tests._modes import Largest

LABELS = torch.tensor([1, 4, 2, 0, 3])


def _heads():
    """Return a patched head, and one that is not, with the same weights."""
    return integration.patch_model(make()).lm_head, make().lm_head


_FEATURES = make().lm_head.in_features


def _hidden(*shape, features=_FEATURES):
    return torch.randn(*shape, features, generator=torch.Generator().manual_seed(1))


def _later_rows(head):
    """A batch of one whose last tokens the head gets: a contiguous view that does not begin its storage."""
    logits = head(_hidden(1, 6)[:, 1:])
    return cross_entropy(logits[0, :-1], LABELS[:4])


def _rows_of_rows(head):
    logits = head(_hidden(6))
    return cross_entropy((logits[1:] * 2)[::2], LABELS[:3])


def _under_no_grad(head):
    logits = head(_hidden(5))
    with torch.no_grad():
        reference = logits * 0.5
    return cross_entropy(logits + reference, LABELS)


def _functional_call(head):
    weight = head.weight * 3
    return cross_entropy(torch.func.functional_call(head, {"weight": weight}, (_hidden(5),)), LABELS)


def _weight_norm(head):
    parametrizations.weight_norm(head)
    head.parametrizations.weight.original0.data.mul_(2)
    return cross_entropy(head(_hidden(5)), LABELS)


def _new_parameter(head):
    logits = head(_hidden(5))
    old, head.weight = head.weight, nn.Parameter(head.weight.detach() * 2)
    loss = cross_entropy(logits, LABELS)
    head.weight = old
    return loss


RIGHT = {
    "rows that do not begin their storage": _later_rows,
    "rows of rows": _rows_of_rows,
    "a term of no_grad": _under_no_grad,
    "functional_call": _functional_call,
    "a parametrization": _weight_norm,
    "a parameter that was replaced since": _new_parameter,
}


def _loss_and_gradients(call, head):
    loss = call(head)
    return [loss.detach(), *torch.autograd.grad(loss, list(head.parameters()))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("call", RIGHT.values(), ids=RIGHT)
@pytest.mark.every_nth_case(3)
def test_the_loss_is_that_of_real_logits(call, compiled):
    if compiled and call in (_functional_call, _weight_norm, _new_parameter):
        call = torch._dynamo.disable(call)
    found = []
    for head in _heads():
        how = torch.compile(call, backend="eager") if compiled else call
        found.append(_loss_and_gradients(how, head))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("what", ["weight", "input", "vector"])
def test_a_loss_of_what_has_changed_since_raises(what):
    head, hidden = _heads()[0], _hidden(5)
    vector = torch.zeros(head.out_features)
    logits = head(hidden) + vector
    with torch.no_grad():
        {"weight": head.weight, "input": hidden, "vector": vector}[what][3] = 10
    with pytest.raises(RuntimeError, match="changed since; use the model's logits, and compute their loss, before"):
        cross_entropy(logits, LABELS)


TRANSFORMS = {
    "grad": lambda loss, weight, hidden: torch.func.grad(loss)(weight, hidden),
    "jvp": lambda loss, weight, hidden: torch.func.jvp(lambda one: loss(one, hidden), (weight,), (weight.cos(),))[1],
    "vmap": lambda loss, weight, hidden: torch.vmap(torch.func.grad(loss), (None, 0))(
        weight, torch.stack([hidden, 2 * hidden])
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_a_patched_head_are_right(transform):
    def loss(head, weight, hidden):
        return cross_entropy(torch.func.functional_call(head, {"weight": weight}, (hidden,)), LABELS)

    torch.testing.assert_close(*(transform(partial(loss, head), head.weight.detach(), _hidden(5)) for head in _heads()))


class _Counted(nn.Module):
    """A parametrization that scales the weight by how often it was computed, like power iterations."""

    def __init__(self):
        super().__init__()
        self.computed = 0

    def forward(self, weight):
        self.computed += 1
        return weight * (1 + 0.5**self.computed)


def _losses(head, materializes):
    counted = _Counted()
    nn.utils.parametrize.register_parametrization(head, "weight", counted)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    before, losses = counted.computed, []
    for _ in range(3):
        optimizer.zero_grad()
        logits = head(_hidden(5))
        loss = logits.square().mean() if materializes else cross_entropy(logits, LABELS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, counted.computed - before


@pytest.mark.parametrize("materializes", [False, True])
def test_a_parametrized_weight_is_computed_once_a_step(materializes):
    patched, plain = (_losses(head, materializes) for head in _heads())
    assert patched[0] == pytest.approx(plain[0], rel=1e-5)
    assert patched[1] == plain[1] == 3


# A frozen head with trained adapters, whose loss needs neither the logits nor a gradient or a copy of the head.
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
    assert largest <= FEATURES * CLASSES  # a view of the head; merging the adapter into a copy would need more


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


WIDER = {
    "a head": lambda logits, others: logits * 0.01 + others,
    "a vector": lambda logits, others: logits.float() + 9 * WEIGHT.float(),
    "integers": lambda logits, others: logits.float() + (999 * WEIGHT.float()).long(),
}


@pytest.mark.parametrize("add", WIDER.values(), ids=WIDER)
def test_what_is_added_to_16_bits_keeps_its_precision(add):
    found = []
    for is_patched in (True, False):
        heads = [_layers(dtype, is_patched)[0].requires_grad_() for dtype in (torch.bfloat16, torch.float32)]
        hidden = _hidden(ROWS, features=FEATURES)
        logits = [head(hidden.to(head.weight.dtype)) for head in heads]
        found.append(cross_entropy(add(*logits), TARGET, reduction="none"))
    torch.testing.assert_close(*found, rtol=5e-5, atol=0)


@pytest.mark.parametrize("kind", ["of two dtypes", "one under autocast"])
def test_heads_that_one_loss_cannot_take_are_added_as_logits(kind):
    found = []
    for is_patched in (True, False):
        dtypes = (torch.float32, torch.float64 if kind == "of two dtypes" else torch.float32)
        first, second = (_layers(dtype, is_patched)[0].requires_grad_() for dtype in dtypes)
        hidden = _hidden(ROWS, features=FEATURES)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "one under autocast"):
            logits = first(hidden)
        loss = cross_entropy(logits + second(hidden.to(dtypes[1])), TARGET, WEIGHT.to(dtypes[1]).abs())
        found.append([loss, *torch.autograd.grad(loss, [first.weight, second.weight])])
    torch.testing.assert_close(*found)


def test_a_traced_16_bit_head_that_is_frozen_is_not_copied_to_float32():
    head, _ = _layers(torch.bfloat16, True)
    _, adapter = _layers(torch.float32, True)
    hidden, dtypes = [_hidden(ROWS, features=size) for size in (FEATURES, RANK)], []

    def loss(weight):
        logits = head(hidden[0].bfloat16()) + torch.func.functional_call(adapter, {"weight": weight}, (hidden[1],))
        return cross_entropy(logits, TARGET)

    def linear_cross_entropy(input, weight, *_):
        dtypes.append((input.dtype, weight.dtype))
        return cross_entropy(input.float() @ weight.float().T, TARGET)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_logit_sums, "_cross_entropy", linear_cross_entropy)
        torch.func.grad(loss)(adapter.weight.detach())
    assert dtypes == [(torch.bfloat16, torch.bfloat16)]


def test_gradients_of_16_bits_are_added_in_float32():
    rows, found = 600, []  # in bfloat16, 256 + 1 is 256
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
