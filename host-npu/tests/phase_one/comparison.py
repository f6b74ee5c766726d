"""Random calls of all operators on one chip, and the differences between the host NPU and the rules."""

import ctypes
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import host_npu
from tests.phase_one import binary_cross_entropy as bce
from tests.phase_one import ema_adam, embedding, mse_loss
from tests.phase_one import linear_cross_entropy as lce
from tests.phase_one.abi import HostNpu, Outcome
from tests.phase_one.draws import Draw
from tests.phase_one.tensors import Answer, Call, Refused, Tensor, Undefined, strides

Rule = Callable[[Call, str], Answer]

_TYPES = {"label_smoothing": ctypes.c_float, "num_weights": ctypes.c_uint64, "padding_idx": ctypes.c_uint64}


@dataclass(frozen=True)
class Operator:
    """An operator: a function that draws calls, and CANN's rule."""

    name: str
    draw: Callable[[Draw], Call]
    rule: Rule
    odd: Mapping[str, Sequence[object]] = field(default_factory=dict)


def operators() -> list[Operator]:
    """Return all operators, with rules in the state of a new process."""
    return [
        Operator("aclnnMseLoss", mse_loss.draw_forward, mse_loss.mse_loss, mse_loss.ODD),
        Operator("aclnnMseLossOut", mse_loss.draw_out, mse_loss.mse_loss_out, mse_loss.ODD),
        Operator("aclnnMseLossBackward", mse_loss.draw_backward, mse_loss.mse_loss_backward, mse_loss.ODD),
        Operator("aclnnBinaryCrossEntropy", bce.draw_forward, bce.binary_cross_entropy, bce.ODD),
        Operator("aclnnBinaryCrossEntropyBackward", bce.draw_backward, bce.binary_cross_entropy_backward, bce.ODD),
        Operator("aclnnEmbedding", embedding.draw_forward, embedding.embedding),
        Operator(
            "aclnnEmbeddingDenseBackward", embedding.draw_backward, embedding.embedding_dense_backward, embedding.ODD
        ),
        Operator("aclnnFusedLinearOnlineMaxSum", lce.draw_max_sum, lce.online_max_sum, lce.ODD),
        Operator("aclnnFusedCrossEntropyLossWithMaxSum", lce.draw_loss, lce.loss_with_max_sum, lce.ODD),
        Operator("aclnnFusedLinearCrossEntropyLossGrad", lce.draw_grad, lce.LossGrad(), lce.ODD),
        Operator("aclnnApplyFusedEmaAdam", ema_adam.draw_step, ema_adam.ema_adam, ema_adam.ODD),
    ]


@dataclass
class Tally:
    """The results of an operator's calls."""

    calls: int = 0
    accepted: int = 0
    undefined: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[int, str]] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add the calls of another chip."""
        self.calls += other.calls
        self.accepted += other.accepted
        self.undefined += other.undefined
        self.refused += other.refused
        self.differences += other.differences
        self.examples = other.examples | self.examples


def drawn(draw: Draw, operator: Operator) -> Call:
    """Draw a call; in two of three, change one or a few arguments."""
    call = operator.draw(draw)
    call.workspace_size = call.executor = True
    spoilt = draw.random.random()
    for _ in range(0 if spoilt < 0.33 else 1 if spoilt < 0.75 else 3):
        draw.spoil(call, operator.odd)
    return call


def differences(operator: Operator, call: Call, chip: str, outcome: Outcome, tally: Tally) -> list[str]:
    """Return the differences between an outcome and the rule, and count the call."""
    answer: Answer | Refused
    try:
        answer = operator.rule(call, chip)
    except Undefined as undefined:
        tally.undefined[str(undefined)] += 1
        return []
    except Refused as refused:
        answer = refused
    views = {name: (value.shape, value.strides) for name, value in vars(call).items() if isinstance(value, Tensor)}
    for changed, shape in answer.views.items():
        # An argument may be passed twice.
        same = [name for name in views if getattr(call, name) is getattr(call, changed)]
        views |= dict.fromkeys(same, (shape, strides(shape)))
    expected: dict[str, object] = {"views": views}
    if isinstance(answer, Refused):
        tally.refused[answer.status, answer.why] += 1
        expected |= {"status": answer.status, "logged": answer.logged}
        if operator.rule is not ema_adam.ema_adam:  # writes its executor before it refuses
            expected |= {"workspace": None, "executor": False}
        why = f"{answer.status} ({answer.why})"
    else:
        tally.accepted += 1
        expected |= {"status": 0, "executor": True}
        if answer.workspace is not None:
            expected["workspace"] = answer.workspace
        why = "success"
    found = {name: getattr(outcome, name) for name in expected}
    wrong = {name: found[name] for name in expected if found[name] != expected[name]}
    if "status" in wrong:
        wrong = {"status": wrong["status"]}
    shown = {name: value if name in ("status", "logged", "executor") else "another" for name, value in wrong.items()}
    details = {name: expected[name] for name in wrong}
    return [f"{why}, got {shown}", f"{call} {details} {wrong}"] if wrong else []


def compare(chip: str, calls: int, seed: int, rules: Sequence[Operator] | None = None) -> dict[str, Tally]:
    """Compare random calls in a process whose environment names the chip.

    Args:
        chip: The chip.
        calls: The number of calls of all operators together.
        seed: The seed of the calls.
        rules: The operators, all by default.

    Returns:
        The results of each operator's calls.
    """
    rules = operators() if rules is None else rules
    library = HostNpu()
    tallies = {operator.name: Tally() for operator in rules}
    draw = Draw(chip, seed)
    for index in range(calls):
        operator = rules[index % len(rules)]
        tally = tallies[operator.name]
        call = drawn(draw, operator)
        outcome = library.phase_one(operator.name, call, _TYPES)
        tally.calls += 1
        found = differences(operator, call, chip, outcome, tally)
        if found:
            tally.differences[found[0]] += 1
            tally.examples.setdefault(found[0], f"{chip}: {found[1]}")
    return tallies


def compare_all(calls: int, seed: int) -> dict[str, Tally]:
    """Compare calls on all chips, each in its own process, and return the results of each operator.

    Args:
        calls: The number of calls on all chips and of all operators together.
        seed: The seed of the calls.
    """
    chips = host_npu.SOCS
    tallies: dict[str, Tally] = {}
    # The processes fork from one that has imported this module but not loaded the libraries.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for index, chip in enumerate(chips):
        share = calls // len(chips) + (index < calls % len(chips))
        with ProcessPoolExecutor(1, context) as pool:
            result = pool.submit(_compare_chip, chip, share, seed).result()
        for name, tally in result.items():
            tallies.setdefault(name, Tally()).add(tally)
    return tallies


def _compare_chip(chip: str, calls: int, seed: int) -> dict[str, Tally]:
    os.environ["HOST_NPU_SOC"] = chip
    return compare(chip, calls, seed)
