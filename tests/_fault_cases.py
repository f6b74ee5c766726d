"""What :mod:`tests.faults` lets every function fail in: operators, drop-ins, modules and the optimizer."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import nn, ops

import torch
from torch import Tensor

from tests import test_ema_adam
from tests._contract import Case as DropInCase
from tests._contract import DropInContract, Maker, tables_of
from tests._failing_steps import CONFIGURATIONS, Attempt
from tests.npu._linear_cross_entropy import CHUNKED, linear_case
from tests.npu._operators import CONTRACTS, flat, to_npu


class Disturbed(Protocol):
    """An action, and a check of what an exception in it has corrupted."""

    def act(self) -> None:
        """Do it."""

    def lost(self, error: BaseException | None) -> str:
        """Do it again; say what is wrong, or nothing."""


@dataclass(frozen=True)
class Case:
    """What is done while functions fail.

    Attributes:
        kind: what is counted together.
        name: what is done.
        start: prepares it; nothing has to be prepared twice in a process.
        group: of cases that make the same calls of CANN, one of each group is taken.
    """

    kind: str
    name: str
    start: Callable[[], Disturbed]
    group: str = ""


class Call:
    """A call that returns tensors. The second one has other arguments, so that no memory has its result already."""

    def __init__(self, function: Callable[[int], list[Tensor]]) -> None:
        self._function = function
        self._expected = [function(seed) for seed in (0, 1)]
        self._result: list[Tensor] = []

    def act(self) -> None:
        """Call it."""
        self._result = self._function(0)

    def lost(self, error: BaseException | None) -> str:
        """Call it again; say what is wrong, or nothing."""
        result, self._result = self._result, []
        if error is None and not _are_equal(result, self._expected[0]):
            return "the result is wrong without an exception"
        return "" if _are_equal(self._function(1), self._expected[1]) else "the next result is wrong"


def _are_equal(results: list[Tensor], expected: list[Tensor]) -> bool:
    return len(results) == len(expected) and all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))  # NaN equals NaN
        for one, other in zip(results, expected, strict=True)
    )


def _cached(function: Callable[[int], list[Tensor]]) -> Callable[[], Disturbed]:
    calls: list[Call] = []

    def start() -> Disturbed:
        if not calls:
            calls.append(Call(function))
        return calls[0]

    return start


def _raw_operators() -> Iterator[Case]:
    for contract in CONTRACTS:
        for sample in (*contract.SAMPLES, *contract.CANN_SAMPLES):
            dtype = contract.CANN_DTYPES[0]
            if not contract.fits_cann(*sample.arguments(Maker(dtype))):
                continue

            def call(seed: int, contract: Any = contract, sample: Any = sample, dtype: Any = dtype) -> list[Tensor]:
                arguments = to_npu(sample.arguments(Maker(dtype, seed)))
                return [output.cpu() for output in flat(contract.OPERATOR.overload(*arguments))]

            yield Case("raw operators", f"{contract.OPERATOR.name}, {sample.name}", _cached(call), contract.__name__)

    def adam(seed: int) -> list[Tensor]:
        made = test_ema_adam.make_tensors(torch.float32, seed=seed)
        tensors = {name: tensor.npu() for name, tensor in made.items()}
        ops.apply_fused_ema_adam_(**tensors, step=torch.tensor([7]).npu(), **test_ema_adam.OPTIONS)
        return [tensors[name].cpu() for name in test_ema_adam.STATE]

    yield Case("raw operators", "apply_fused_ema_adam_", _cached(adam))


def _loss_and_gradients(function: Callable[..., Any], leaves: list[Tensor], *others: Tensor) -> list[Tensor]:
    leaves = [leaf.npu().requires_grad_() for leaf in leaves]
    result = function(*leaves, *(other.npu() for other in others))
    outputs = [tensor for tensor in (result if isinstance(result, tuple) else (result,)) if tensor is not None]
    differentiable = [output for output in outputs if output.requires_grad]
    gradients = torch.autograd.grad(
        differentiable, leaves, [torch.ones_like(one) for one in differentiable], allow_unused=True
    )
    return [tensor.detach().cpu() for tensor in (*outputs, *gradients) if tensor is not None]


def _drop_ins() -> Iterator[Case]:
    for table in tables_of(DropInContract):
        operator = table.__module__.removeprefix("tests.test_")
        # The features of the linear cross entropy are below, one by one.
        if "linear_cross_entropy" in operator and table.__name__ != "TestDropIn":
            continue
        for case in table.CASES:

            def call(seed: int, case: DropInCase = case) -> list[Tensor]:
                make = Maker(torch.float32, seed)
                inputs, constants = case.inputs(make), case.constants(make)
                return _loss_and_gradients(lambda *tensors: case.call(ours, *tensors), list(inputs), *constants)

            yield Case("drop-ins", f"{operator}, {case.name}", _cached(call), operator)


def _modules() -> Iterator[Case]:
    def loss(module: Callable[[], torch.nn.Module]) -> Callable[[int], list[Tensor]]:
        def call(seed: int) -> list[Tensor]:
            make, made = Maker(torch.float32, seed), module().npu()
            others = list(inspect.signature(made.forward).parameters)[1:]  # the target of a loss
            return _loss_and_gradients(made, [make.probability(3, 4)], *(make.probability(3, 4) for _ in others))

        return call

    def embedding(seed: int) -> list[Tensor]:
        table = nn.Embedding(12, 8, padding_idx=-1, _weight=Maker(torch.float32).normal(12, 8)).npu()
        table(Maker(torch.float32, seed).index(12, 6, 3).npu()).sum().backward()
        return [table.weight.grad.cpu()]

    def linear(seed: int) -> list[Tensor]:
        hidden, weight, target = linear_case(torch.bfloat16, seed=seed)
        module = nn.LinearCrossEntropyLoss(16, 160, dtype=torch.bfloat16)
        module.load_state_dict({name: weight for name in module.state_dict()})
        return _loss_and_gradients(module.npu(), [hidden], target)

    def divergence(seed: int) -> list[Tensor]:
        make = Maker(torch.float32, seed)
        tensors = [make.normal(*shape).npu() for shape in ((6, 4), (12, 4), (6, 8), (12, 8))]
        return _loss_and_gradients(nn.LinearKLDivLoss("reverse_kl"), tensors[:1], *tensors[1:])

    calls = {
        "LinearKLDivLoss": divergence,
        "BCELoss": loss(lambda: nn.BCELoss(weight=torch.linspace(0.5, 1, 4))),
        "Embedding": embedding,
        "LinearCrossEntropyLoss": linear,
    }
    for name in nn.__all__:
        yield Case("modules", name, _cached(calls.get(name) or loss(getattr(nn, name))))


LINEAR = {
    "fused": {},
    "fused, none": {"reduction": "none"},
    "fused, z-loss": {"lse_square_scale": 0.01},
    "fused, log probabilities": {"outputs": ("log_probabilities",)},
    "fused, class weights": {"weight": torch.linspace(0, 1, 160, dtype=torch.bfloat16)},
    **{f"chunked, because {reason}": options for reason, options in CHUNKED.items()},
}


def _linear_cross_entropy() -> Iterator[Case]:
    for name, options in LINEAR.items():

        def call(seed: int, options: dict[str, Any] = options) -> list[Tensor]:
            hidden, head, target = linear_case(torch.bfloat16, seed=seed)
            moved = {key: value.npu() if isinstance(value, Tensor) else value for key, value in options.items()}
            return _loss_and_gradients(
                lambda *tensors: ours.linear_cross_entropy(*tensors, **moved), [hidden, head], target
            )

        yield Case("linear_cross_entropy", name, _cached(call))


def _optimizer() -> Iterator[Case]:
    for name, action, steps in itertools.product(CONFIGURATIONS, ("step", "swap"), (0, 2)):
        start = lambda case=(name, action, steps): Attempt("npu", *case)  # noqa: E731
        yield Case("optimizer", f"{name}, {action} after {steps} steps", start)


def _collectives() -> Iterator[Case]:
    """Communication: whatever one makes, uses and leaves a group of one process."""
    from torch import distributed

    def reduced(tensor: Tensor) -> Tensor:
        distributed.all_reduce(tensor)
        return tensor

    def gathered(tensor: Tensor) -> Tensor:
        result = torch.empty_like(tensor)
        distributed.all_gather_into_tensor(result, tensor)
        return result

    def exchanged(tensor: Tensor) -> Tensor:
        result = torch.empty_like(tensor)
        distributed.all_to_all_single(result, tensor, [len(tensor)], [len(tensor)])
        return result

    for use in (reduced, gathered, exchanged):

        def call(seed: int, use: Callable[[Tensor], Tensor] = use) -> list[Tensor]:
            tensor = Maker(torch.float32, seed).normal(5).npu()
            distributed.init_process_group("hccl", store=distributed.HashStore(), rank=0, world_size=1)
            try:
                return [use(tensor).cpu()]
            finally:
                distributed.destroy_process_group()

        yield Case("collectives", use.__name__, _cached(call))


def cases() -> list[Case]:
    """Return all cases."""
    makers = (_raw_operators, _drop_ins, _modules, _linear_cross_entropy, _optimizer, _collectives)
    return [case for make in makers for case in make()]
