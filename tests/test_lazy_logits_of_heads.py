"""The loss of lazy logits is that of the head and the input as they were in the forward pass, or raises."""

from functools import partial

from torch_aclnn_ops.integrations import transformers as integration

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

from tests._language_models import make

LABELS = torch.tensor([1, 4, 2, 0, 3])
CLASSES = make().lm_head.out_features


def _heads():
    """Return a patched head, and one that is not, with the same weights."""
    return integration.patch_model(make()).lm_head, make().lm_head


_FEATURES = make().lm_head.in_features


def _hidden(*shape, features=_FEATURES):
    return torch.randn(*shape, features, generator=torch.Generator().manual_seed(1))


def _later_rows(head):
    """A batch of one, of which the head gets the last tokens: a contiguous view that does not begin its storage."""
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


def _write_to_the_weight(head, hidden, vector):
    head.weight.mul_(3)


def _write_to_the_input(head, hidden, vector):
    hidden.mul_(3)


def _write_to_the_vector(head, hidden, vector):
    vector[3] = 10


@pytest.mark.parametrize("write", [_write_to_the_weight, _write_to_the_input, _write_to_the_vector])
def test_a_loss_of_what_has_changed_since_raises(write):
    head, hidden, vector = _heads()[0], _hidden(5), torch.zeros(CLASSES)
    logits = head(hidden) + vector
    with torch.no_grad():
        write(head, hidden, vector)
    with pytest.raises(RuntimeError, match="changed since; use the model's logits, and compute their loss, before"):
        cross_entropy(logits, LABELS)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transforms_of_a_patched_head_are_right(transform):
    def loss(head, weight, hidden):
        return cross_entropy(torch.func.functional_call(head, {"weight": weight}, (hidden,)), LABELS)

    found = []
    for head in _heads():
        weight, hidden = head.weight.detach(), _hidden(5)
        one = partial(loss, head)
        if transform == "grad":
            found.append(torch.func.grad(one)(weight, hidden))
        elif transform == "jvp":
            tangents = torch.ones_like(weight), torch.zeros_like(hidden)
            found.append(torch.func.jvp(one, (weight, hidden), tangents)[1])
        else:
            several = torch.stack([hidden, 2 * hidden])
            found.append(torch.vmap(torch.func.grad(one), (None, 0))(weight, several))
    torch.testing.assert_close(*found)


class _Counted(nn.Module):
    """A parametrization that scales the weight by how often it was computed, as power iterations change it."""

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
