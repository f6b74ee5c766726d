"""Arguments without a derivative that ``vmap`` batches, in forward mode, which must find or refuse their tangents."""

from functools import partial

from torch_aclnn_ops import functional as ours

import pytest
import torch
from torch.func import jvp, vmap

F64 = torch.float64
HEAD = torch.linspace(-1, 1, 28, dtype=F64).view(7, 4)
TARGET = torch.tensor([0, 6, 3, 3, 1])


def _bce(hidden, weight):
    return ours.binary_cross_entropy(hidden.sigmoid(), torch.full_like(hidden, 0.3), weight=weight)


def _dpo(hidden, reference):
    return ours.dpo_loss(hidden.sum(1), hidden.mean(1), reference[:, 0], reference[:, 1])


def _kto(hidden, reference):
    return ours.kto_loss(hidden.sum(1), reference[:, 0], TARGET > 2, 0.0)


def _grpo(hidden, old):
    return ours.grpo_loss(hidden.log_softmax(-1), torch.ones(5, dtype=F64), torch.ones(5, 4), old_log_probs=-old.exp())


def _kl(hidden, teacher):
    return ours.linear_kl_div(hidden, HEAD, teacher_probs=(teacher @ HEAD.T).softmax(-1))


def _class_weight(hidden, weight):
    return ours.linear_cross_entropy(hidden, HEAD, TARGET, weight=weight.sum(0).repeat(2)[:7].square())


CASES = {
    "binary_cross_entropy": _bce,
    "dpo_loss": _dpo,
    "kto_loss": _kto,
    "grpo_loss": _grpo,
    "linear_kl_div": _kl,
    "linear_cross_entropy": _class_weight,
}


def _tangent(function, point):
    return jvp(function, (point,), (torch.ones_like(point),))[1]


@pytest.mark.parametrize("name", CASES)
def test_a_batched_constant_without_a_tangent_equals_a_loop(name):
    loss, hidden, constants = CASES[name], torch.randn(5, 4, dtype=F64), torch.randn(3, 5, 4, dtype=F64)
    batched = _tangent(lambda hidden: vmap(partial(loss, hidden))(constants), hidden)
    looped = [_tangent(lambda hidden, one=one: loss(hidden, one), hidden) for one in constants]
    torch.testing.assert_close(batched, torch.stack(looped))


@pytest.mark.parametrize("name", CASES)
def test_a_batched_constant_with_a_tangent_raises(name):
    hidden, constants = torch.randn(5, 4, dtype=F64), torch.randn(3, 5, 4, dtype=F64)
    with pytest.raises(RuntimeError, match=f"{name}: .* a tangent"):
        _tangent(vmap(partial(CASES[name], hidden)), constants)
