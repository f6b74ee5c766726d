"""FusedEmaAdam: parameter names decide which state of a checkpoint belongs to which parameter."""

import copy
import io
import re

from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn

from tests._optim import step_with

VALUES = {"a": 1.0, "b": 100.0, "c": 7.0}


def _optimizer(*groups, named=True):
    """Return an optimizer whose learning rate in a group is the value of its first parameter, and its parameters."""
    params = {name: nn.Parameter(torch.full((4,), VALUES[name])) for names in groups for name in names}
    given = [
        {"params": [(name, params[name]) if named else params[name] for name in names], "lr": VALUES[names[0]] * 1e-3}
        for names in groups
    ]
    return FusedEmaAdam(given, ema_decay=0.9), params


def _checkpoint(*groups, **options):
    """Return a checkpoint after a step."""
    optimizer, _ = _optimizer(*groups, **options)
    step_with(optimizer)
    return copy.deepcopy(optimizer.state_dict())


def _averages(optimizer, params):
    return {name: round(optimizer.state[param]["ema_params"][0].item()) for name, param in params.items()}


ORDERS = {
    "the same": ["ab", "c"],
    "other parameters first": ["ba", "c"],
    "other groups first": ["c", "ab"],
    "both": ["c", "ba"],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_state_belongs_to_the_parameter_of_its_name(order):
    optimizer, params = _optimizer(*order)
    optimizer.load_state_dict(_checkpoint("ab", "c"))
    assert _averages(optimizer, params) == VALUES
    assert [group["param_names"] for group in optimizer.param_groups] == [list(names) for names in order]
    rates = {"".join(sorted(group["param_names"])): group["lr"] for group in optimizer.param_groups}
    assert rates == {"ab": 1e-3, "c": 7e-3}


@pytest.mark.parametrize(("was_named", "is_named"), [(False, True), (True, False), (False, False)])
def test_without_names_on_one_side_the_order_decides(was_named, is_named):
    optimizer, params = _optimizer("ba", named=is_named)
    optimizer.load_state_dict(_checkpoint("ab", named=was_named))
    assert _averages(optimizer, params) == {"b": VALUES["a"], "a": VALUES["b"]}


REFUSED = {
    "another name": (["ab"], ["ac"], "[['a', 'c']]", "[['a', 'b']]"),
    "more parameters": (["ab"], ["a"], "[['a']]", "[['a', 'b']]"),
    "more groups": (["b", "a"], ["a"], "[['a']]", "[['b'], ['a']]"),
    "other groups": (["ab", "c"], ["a", "bc"], "[['a'], ['b', 'c']]", "[['a', 'b'], ['c']]"),
}


@pytest.mark.parametrize(("saved", "own", "accepted", "found"), REFUSED.values(), ids=REFUSED)
def test_names_that_differ_are_refused_and_change_nothing(saved, own, accepted, found):
    optimizer, _ = _optimizer(*own)
    sentence = (
        f"FusedEmaAdam.load_state_dict: param_names of the groups must be {accepted} in any order, each name once (to"
        f" load by order, remove param_names), but it is {found}"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        optimizer.load_state_dict(_checkpoint(*saved))
    assert not optimizer.state


@pytest.mark.parametrize("is_named", [True, False])
def test_a_distributed_checkpoint_in_another_order_is_loaded_by_the_names_of_the_model(is_named):
    models = [nn.ParameterDict({name: torch.full((4,), VALUES[name]) for name in "ab"}) for _ in range(2)]
    first = FusedEmaAdam(models[0].named_parameters(), ema_decay=0.9)
    step_with(first)
    file = io.BytesIO()
    torch.save(dcp.get_optimizer_state_dict(models[0], first), file)
    file.seek(0)
    named = [("b", models[1]["b"]), ("a", models[1]["a"])]
    second = FusedEmaAdam(named if is_named else [param for _, param in named], ema_decay=0.9)
    dcp.set_optimizer_state_dict(models[1], second, torch.load(file))
    assert _averages(second, models[1]) == {"a": VALUES["a"], "b": VALUES["b"]}
    assert second.param_groups[0].get("param_names", ["b", "a"]) == ["b", "a"]
