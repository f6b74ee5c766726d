"""What ``benchmarks.errors`` computes: arguments of stated distributions, by our operators and by torch's functions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
from torch_aclnn_ops import functional, ops
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops._torch_compat.private import fused_adamw_

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Results = dict[str, Tensor]


class Draw:
    """Makes reproducible tensors of one dtype; sizes are those of the page, or smaller for a quick look."""

    def __init__(self, dtype: torch.dtype, is_small: bool = False) -> None:
        self.dtype = dtype
        self.wide = accumulation_dtype(dtype)
        self._divisor = 64 if is_small else 1
        self._generator = torch.Generator().manual_seed(0)

    def size(self, number: int) -> int:
        """Return the reduced number of rows or elements of a quick run."""
        return max(number // self._divisor, 8)

    def normal(self, *shape: int, by: float = 1.0) -> Tensor:
        """Return normal numbers of this standard deviation."""
        return (torch.randn(shape, generator=self._generator, dtype=torch.float64) * by).to(self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return numbers between two others."""
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return (drawn * (high - low) + low).to(self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """Return whole numbers from 0 on."""
        return torch.randint(high, shape, generator=self._generator)


@dataclass(frozen=True)
class Case:
    """Arguments of an operator, how they are distributed, and two functions that make results of them by name."""

    operator: str
    distribution: str
    draw: Callable[[Draw], Arguments]
    ours: Callable[..., Results]
    torchs: Callable[..., Results]
    truth: Callable[..., Results] | None = None  # in float64; by default ours


def _by_operator(name: str, *results: str) -> Callable[..., Results]:
    """Call a raw operator, and name its first results."""

    def call(*args: Any) -> Results:
        found = getattr(torch.ops.torch_aclnn_ops, name)(*args)
        return dict(zip(results, found if isinstance(found, tuple | list) else (found,), strict=False))

    return call


def _of_aten(name: str, cases: dict[str, Callable[[Draw], Arguments]]) -> list[Case]:
    native = getattr(torch.ops.aten, name).default
    ours = _by_operator(name, "gradient")
    return [
        Case(name, distribution, draw, ours, lambda *args: {"gradient": native(*args)})
        for distribution, draw in cases.items()
    ]


def _one(draw: Draw, value: float = 1.0) -> Tensor:
    return torch.tensor(value, dtype=draw.dtype)


def _differing_by_a_hundredth(draw: Draw) -> Arguments:
    input = draw.normal(draw.size(4096), by=100)
    return _one(draw), input, (input.double() * 1.01).to(draw.dtype), 1


def _near_the_ends(draw: Draw) -> Arguments:
    number = draw.size(4096)
    probability = draw.normal(number, by=8).double().sigmoid().to(draw.dtype)
    return draw.normal(number), probability, draw.index(2, number).to(draw.dtype), None, 0


_OF_ATEN = [
    *_of_aten(
        "mse_loss_backward",
        {
            "normal, mean of 4,096": lambda d: (_one(d), d.normal(d.size(4096)), d.normal(d.size(4096)), 1),
            "normal, mean of 1,048,576, times 1,024": lambda d: (
                *(_one(d, 1024), d.normal(d.size(2**20)), d.normal(d.size(2**20)), 1),
            ),
            "near 100, differing by 1%, mean of 4,096": _differing_by_a_hundredth,
        },
    ),
    *_of_aten(
        "binary_cross_entropy_backward",
        {
            "probabilities 0.05 to 0.95, mean of 4,096": lambda d: (
                *(_one(d), d.uniform(d.size(4096), low=0.05, high=0.95), d.uniform(d.size(4096)), None, 1),
            ),
            "probabilities near 0 and 1 (sigmoid of 8 x normal), none": _near_the_ends,
            "probabilities 0.05 to 0.95, mean of 1,048,576, times 1,024": lambda d: (
                *(_one(d, 1024), d.uniform(d.size(2**20), low=0.05, high=0.95), d.uniform(d.size(2**20)), None, 1),
            ),
        },
    ),
    *_of_aten(
        "embedding_dense_backward",
        {
            "normal, 4,096 of 1,000 rows": lambda d: (
                *(d.normal(d.size(4096), 16), d.index(1000, d.size(4096)), 1000, -1, False),
            ),
            "0 to 1, one row 65,536 times": lambda d: (
                *(d.uniform(d.size(2**16), 16), torch.full((d.size(2**16),), 3), 8, -1, False),
            ),
            "normal, one row 65,536 times, by frequency": lambda d: (
                *(d.normal(d.size(2**16), 16), torch.full((d.size(2**16),), 3), 8, -1, True),
            ),
        },
    ),
]


# Arguments that are no tensors: a reduction is "none", a scale is 1.
_NUMBERS = {"int": 0, "float": 1.0, "bool": False}


def _normal_numbers(name: str, draw: Draw) -> Arguments:
    types = [str(one.type) for one in getattr(torch.ops.torch_aclnn_ops, name).default._schema.arguments]
    return tuple(draw.normal(draw.size(4096)) if one == "Tensor" else _NUMBERS[one] for one in types)


# Every other operator that PyTorch has too.
_OF_ATEN += [
    case
    for name in ops.__all__
    if hasattr(torch.ops.aten, name) and name not in {case.operator for case in _OF_ATEN}
    for case in _of_aten(name, {"normal, 4,096 elements": partial(_normal_numbers, name)})
]
_FEATURES, _CLASSES = 64, 1000
_LOGITS = {"logits of deviation 1": 1.0, "wide logits, of deviation 30": 30.0}


def _linear(draw: Draw, deviation: float, rows: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, head and targets whose logits have this standard deviation."""
    number = draw.size(rows)
    head = draw.normal(_CLASSES, _FEATURES, by=deviation / _FEATURES**0.5)
    return draw.normal(number, _FEATURES), head, draw.index(_CLASSES, number)


def _certain(draw: Draw, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, head and targets with a logit of about 20 at the target, and a loss of about 0.001."""
    number = draw.size(rows)
    head, target = draw.normal(_CLASSES, _FEATURES, by=0.3), draw.index(_CLASSES, number)
    return head[target] / 0.3 + draw.normal(number, _FEATURES, by=0.3), head, target


def _statistics(draw: Draw, input: Tensor, head: Tensor, target: Tensor) -> list[Tensor]:
    logits = input.double() @ head.double().T
    logits_max = logits.amax(1)
    predicted = logits.gather(1, target.unsqueeze(1)).squeeze(1) - logits_max
    sums = (logits - logits_max.unsqueeze(1)).exp().sum(1)
    return [tensor.to(draw.wide) for tensor in (logits_max, sums, predicted)]


def _torchs_max_sum(input: Tensor, head: Tensor, target: Tensor, *_: object) -> Results:
    logits = torch.nn.functional.linear(input, head)
    logits_max = logits.amax(1)
    sums = (logits - logits_max.unsqueeze(1)).exp().sum(1)
    predicted = logits.gather(1, target.unsqueeze(1)).squeeze(1) - logits_max
    return {"statistics": torch.stack([logits_max, sums, predicted])}


def _max_sum(*args: Any) -> Results:
    return {"statistics": torch.stack(torch.ops.torch_aclnn_ops.fused_linear_online_max_sum(*args)[:3])}


def _torchs_loss(logits_max: Tensor, sums: Tensor, predicted: Tensor, logits: Tensor) -> Results:
    return {"loss": sums.log() - predicted, "softmax": logits.softmax(1)}


def _loss_arguments(draw: Draw, deviation: float) -> Arguments:
    logits = draw.normal(draw.size(512), _CLASSES, by=deviation)
    identity = torch.eye(_CLASSES, dtype=draw.dtype)
    return *_statistics(draw, logits, identity, draw.index(_CLASSES, draw.size(512))), logits


def _gradient_arguments(draw: Draw, deviation: float) -> Arguments:
    input, head, target = _linear(draw, deviation)
    logits_max, sums, _ = _statistics(draw, input, head, target)
    grad = draw.uniform(len(input), low=0.5, high=1.5).to(draw.wide)
    return grad, input, head, torch.zeros(len(input), dtype=torch.bool), target, logits_max, sums, None


def _torchs_gradients(grad: Tensor, input: Tensor, head: Tensor, _mask: Tensor, target: Tensor, *_: Any) -> Results:
    leaves = [tensor.detach().requires_grad_() for tensor in (input, head)]
    losses = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), target, reduction="none")
    return dict(zip(_GRADIENTS, torch.autograd.grad(losses, leaves, grad.to(losses.dtype)), strict=True))


_GRADIENTS = ("gradient by input", "gradient by weight")


def _loss_and_gradients(function: Callable[..., Tensor]) -> Callable[..., Results]:
    def call(input: Tensor, head: Tensor, target: Tensor, options: dict[str, Any]) -> Results:
        leaves = [tensor.detach().requires_grad_() for tensor in (input, head)]
        loss = function(*leaves, target, **options)
        gradients = torch.autograd.grad(loss, leaves)
        return {"loss": loss.detach(), **dict(zip(_GRADIENTS, gradients, strict=True))}

    return call


def _torchs_linear_cross_entropy(input: Tensor, head: Tensor, target: Tensor, **options: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, head), target, **options)


def _linear_cross_entropy(distribution: str, draw: Callable[[Draw], Arguments]) -> Case:
    ours, torchs = map(_loss_and_gradients, (functional.linear_cross_entropy, _torchs_linear_cross_entropy))
    return Case("linear_cross_entropy", distribution, draw, ours, torchs, torchs)


def _linear_cross_entropies() -> list[Case]:
    cases = []
    for distribution, deviation in _LOGITS.items():
        cases += [
            Case(
                "fused_linear_online_max_sum",
                distribution,
                lambda d, by=deviation: (*_linear(d, by), 0, _CLASSES, False),
                _max_sum,
                _torchs_max_sum,
            ),
            Case(
                "fused_cross_entropy_loss_with_max_sum",
                distribution,
                lambda d, by=deviation: _loss_arguments(d, by),
                _by_operator("fused_cross_entropy_loss_with_max_sum", "loss", "softmax"),
                _torchs_loss,
            ),
            Case(
                "fused_linear_cross_entropy_loss_grad",
                distribution,
                lambda d, by=deviation: _gradient_arguments(d, by),
                _by_operator("fused_linear_cross_entropy_loss_grad", *_GRADIENTS),
                _torchs_gradients,
            ),
        ]
        cases += [
            _linear_cross_entropy(
                f"{distribution}, mean of 4,096{', smoothed by 0.1' if options else ''}",
                lambda d, by=deviation, options=options: (*_linear(d, by, rows=4096), options),
            )
            for options in ({}, {"label_smoothing": 0.1})
        ]
    cases.append(_linear_cross_entropy("the targets nearly certain, mean of 4,096", lambda d: (*_certain(d, 4096), {})))
    return cases


_ADAM = {
    "lr": 1e-2, "ema_decay": 0.999, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
    "weight_decay_mode": 1, "bias_correction": True, "weight_decay": 0.1,
}  # fmt: skip


def _adam(operator: Callable[..., None]) -> Callable[..., Results]:
    def call(*args: Tensor) -> Results:
        grad, *states, step = (tensor.clone() for tensor in args)
        operator(grad, *states, step, **_ADAM)
        return dict(zip(("weights", "first moments", "second moments", "EMA weights"), states, strict=True))

    return call


def _torchs_adam(grad: Tensor, var: Tensor, m: Tensor, v: Tensor, s: Tensor, step: Tensor, **options: Any) -> None:
    given = {name: options[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    fused_adamw_([var], [grad], [m], [v], [], [step.float()], **given, amsgrad=False, maximize=False)
    s.lerp_(var, 1 - options["ema_decay"])


def _states(draw: Draw, moments: float, step: int, number: int = 4096) -> Arguments:
    """Return gradients and moments of this size, weights, an average, and a count of steps."""
    size = draw.size(number)
    grad, var, m = draw.normal(size, by=moments), draw.normal(size), draw.normal(size, by=moments)
    v = draw.uniform(size, high=moments**2)
    return grad, var, m, v, draw.normal(size), torch.tensor([step])


_STEPS = [
    Case(
        "apply_fused_ema_adam_",
        distribution,
        lambda d, moments=moments, step=step: _states(d, moments, step),
        _adam(ops.apply_fused_ema_adam_),
        _adam(_torchs_adam),
    )
    for distribution, moments, step in (
        ("normal gradients, step 10", 1.0, 10),
        ("normal gradients, step 100,000", 1.0, 100_000),
        ("tiny second moments (gradients of 1e-6), step 10", 1e-6, 10),
    )
]

CASES: list[Case] = [*_OF_ATEN, *_linear_cross_entropies(), *_STEPS]
