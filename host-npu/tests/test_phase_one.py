"""Phase one of the host NPU gives CANN's answers to random calls; ``make phase-one`` makes many more."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.phase_one.abi import Outcome
from tests.phase_one.comparison import Operator, Tally, compare_all, differences, operators
from tests.phase_one.draws import Draw
from tests.phase_one.tensors import FLOAT, ND, NULL_POINTER, Call, Shape, Tensor, strides

_PAGE = Path(__file__).parents[1] / "docs/internals.md"
_RULES = Path(__file__).parent / "phase_one"
_NAMES = [operator.name for operator in operators()]


@pytest.fixture(scope="module")
def tallies() -> dict[str, Tally]:
    """Return the results of calls on all chips."""
    return compare_all(calls=25_000, seed=2026)


@pytest.mark.parametrize("name", _NAMES)
def test_random_calls_are_answered_as_the_rules_say(name: str, tallies: dict[str, Tally]) -> None:
    assert tallies[name].calls > 2000
    assert not tallies[name].examples


@pytest.mark.parametrize("name", _NAMES)
def test_a_good_part_of_the_calls_is_accepted(name: str, tallies: dict[str, Tally]) -> None:
    assert 0.2 <= tallies[name].accepted / tallies[name].calls <= 0.65


def test_every_refusal_of_the_rules_is_drawn(tallies: dict[str, Tally]) -> None:
    rules = "".join(path.read_text() for path in _RULES.glob("*.py"))
    stated = set(re.findall(r'(?:require|Refused)\((?:[^()]|\([^()]*\))*?, "([^"]+)"', rules))
    drawn = {why for tally in tallies.values() for _, why in tally.refused}
    assert len(stated) > 30 and stated <= drawn


def test_the_page_names_every_class_of_calls_that_are_not_compared(tallies: dict[str, Tally]) -> None:
    classes = {why for tally in tallies.values() for why in tally.undefined}
    page = " ".join(_PAGE.read_text().split())
    assert classes and not [why for why in classes if why not in page]


def _tensor(shape: Shape) -> Tensor:
    return Tensor(FLOAT, shape, strides(shape), 0, shape, ND)


def _call(**changes: object) -> Call:
    arguments = {"self": _tensor((2, 0)), "target": _tensor((2, 0)), "reduction": 0, "out": _tensor((2, 0))}
    return Call(**(arguments | {"workspace_size": True, "executor": True} | changes))


def _found(call: Call, outcome: Outcome) -> list[str]:
    operator = next(operator for operator in operators() if operator.name == "aclnnMseLoss")
    return differences(operator, call, "Ascend910B", outcome, Tally())


def _outcome(call: Call, **changes: object) -> Outcome:
    views = {name: (value.shape, value.strides) for name, value in vars(call).items() if isinstance(value, Tensor)}
    outcome = Outcome(status=0, workspace=0, executor=True, logged=False, views=views)
    return replace(outcome, **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"status": 161002},
        {"workspace": 512},
        {"workspace": None},
        {"executor": False},
        {"views": {"self": ((2, 0), (0, 1)), "target": ((2, 0), (0, 1)), "out": ((), ())}},
    ],
)
def test_another_answer_to_an_accepted_call_is_a_difference(change: dict[str, object]) -> None:
    call = _call()
    assert not _found(call, _outcome(call))
    assert _found(call, _outcome(call, **change))


@pytest.mark.parametrize(
    "change", [{"status": 0}, {"status": 161002}, {"workspace": 0}, {"executor": True}, {"logged": False}]
)
def test_another_answer_to_a_refused_call_is_a_difference(change: dict[str, object]) -> None:
    call = _call(target=None)
    refused = _outcome(call, status=NULL_POINTER, workspace=None, executor=False, logged=True)
    assert not _found(call, refused)
    assert _found(call, replace(refused, **change))


@pytest.mark.parametrize("operator", operators(), ids=_NAMES)
def test_a_seed_fixes_the_calls(operator: Operator) -> None:
    drawn = [[operator.draw(draw) for _ in range(5)] for draw in (Draw("Ascend950", seed) for seed in (1, 1, 2))]
    assert drawn[0] == drawn[1] != drawn[2]
