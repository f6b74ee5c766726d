"""The cases of ``benchmarks.errors``: arguments with stated distributions, for our operators and for torch's."""

from collections.abc import Callable, Iterator
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
    """Makes reproducible tensors of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide = accumulation_dtype(dtype)
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, by: float = 1.0) -> Tensor:
        """Return normal numbers with this standard deviation."""
        return (torch.randn(shape, generator=self._generator, dtype=torch.float64) * by).to(self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform numbers between two bounds."""
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return (drawn * (high - low) + low).to(self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """Return integers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self._generator)


@dataclass(frozen=True)
class Case:
    """Arguments of an operator, their distribution, and two functions that compute results, by name."""

    operator: str
    distribution: str
    draw: Callable[[Draw], Arguments]
    ours: Callable[..., Results]
    torchs: Callable[..., Results]
    truth: Callable[..., Results] | None = None  # in float64; by default ours


_OURS = torch.ops.torch_aclnn_ops


def _by_operator(operators: Any, name: str, *results: str) -> Callable[..., Results]:
    """Call an operator of a namespace, and name its first results."""

    def call(*args: Any) -> Results:
        found = getattr(operators, name)(*args)
        return dict(zip(results, found if isinstance(found, tuple | list) else (found,), strict=False))

    return call


def _one(draw: Draw, value: float = 1.0) -> Tensor:
    return torch.tensor(value, dtype=draw.dtype)


def _differing_by_a_hundredth(draw: Draw) -> Arguments:
    input = draw.normal(4096, by=100)
    return _one(draw), input, (input.double() * 1.01).to(draw.dtype), 1


def _probabilities(draw: Draw, number: int) -> Arguments:
    return draw.uniform(number, low=0.05, high=0.95), draw.uniform(number), None, 1


def _near_the_ends(draw: Draw) -> Arguments:
    probability = draw.normal(4096, by=8).double().sigmoid().to(draw.dtype)
    return draw.normal(4096), probability, draw.index(2, 4096).to(draw.dtype), None, 0


_ONE_ROW = torch.full((2**16,), 3)
_OF_ATEN = {
    "mse_loss_backward": {
        "normal, mean of 4,096": lambda d: (_one(d), d.normal(4096), d.normal(4096), 1),
        "normal, mean of 1,048,576, times 1,024": lambda d: (_one(d, 1024), d.normal(2**20), d.normal(2**20), 1),
        "near 100, differing by 1%, mean of 4,096": _differing_by_a_hundredth,
    },
    "binary_cross_entropy_backward": {
        "probabilities 0.05 to 0.95, mean of 4,096": lambda d: (_one(d), *_probabilities(d, 4096)),
        "probabilities near 0 and 1 (sigmoid of 8 x normal), none": _near_the_ends,
        "probabilities 0.05 to 0.95, mean of 1,048,576, times 1,024": lambda d: (
            _one(d, 1024),
            *_probabilities(d, 2**20),
        ),
    },
    "embedding_dense_backward": {
        "normal, 4,096 of 1,000 rows": lambda d: (d.normal(4096, 16), d.index(1000, 4096), 1000, -1, False),
        "0 to 1, one row 65,536 times": lambda d: (d.uniform(2**16, 16), _ONE_ROW, 8, -1, False),
        "normal, one row 65,536 times, by frequency": lambda d: (d.normal(2**16, 16), _ONE_ROW, 8, -1, True),
    },
}
# Values for arguments that are not tensors: a reduction is "none", a scale is 1.
_NUMBERS = {"int": 0, "float": 1.0, "bool": False}


def _normal_numbers(name: str, draw: Draw) -> Arguments:
    types = [str(one.type) for one in getattr(_OURS, name).default._schema.arguments]
    return tuple(draw.normal(4096) if one == "Tensor" else _NUMBERS[one] for one in types)


def _of_aten() -> Iterator[Case]:
    for name in dict.fromkeys([*_OF_ATEN, *(name for name in ops.__all__ if hasattr(torch.ops.aten, name))]):
        theirs, ours = (_by_operator(operators, name, "gradient") for operators in (torch.ops.aten, _OURS))
        for distribution, draw in _OF_ATEN.get(
            name, {"normal, 4,096 elements": partial(_normal_numbers, name)}
        ).items():
            yield Case(name, distribution, draw, ours, theirs)


_FEATURES, _CLASSES = 64, 1000
_GRADIENTS = ("gradient by input", "gradient by weight")


def _linear(draw: Draw, deviation: float, rows: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, head and targets whose logits have this standard deviation."""
    head = draw.normal(_CLASSES, _FEATURES, by=deviation / _FEATURES**0.5)
    return draw.normal(rows, _FEATURES), head, draw.index(_CLASSES, rows)


def _certain(draw: Draw) -> Arguments:
    """Return input, head and targets with a logit of about 20 at the target, and a loss of about 0.001."""
    head, target = draw.normal(_CLASSES, _FEATURES, by=0.3), draw.index(_CLASSES, 4096)
    return head[target] / 0.3 + draw.normal(4096, _FEATURES, by=0.3), head, target, 0.0


def _statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest = logits.amax(1)
    sums = (logits - largest.unsqueeze(1)).exp().sum(1)
    return largest, sums, logits.gather(1, target.unsqueeze(1)).squeeze(1) - largest


def _max_sum(*args: Any) -> Results:
    return {"statistics": torch.stack(_OURS.fused_linear_online_max_sum(*args)[:3])}


def _torchs_max_sum(input: Tensor, head: Tensor, target: Tensor, *_: object) -> Results:
    return {"statistics": torch.stack(_statistics(torch.nn.functional.linear(input, head), target))}


def _torchs_loss(logits_max: Tensor, sums: Tensor, predicted: Tensor, logits: Tensor) -> Results:
    return {"loss": sums.log() - predicted, "softmax": logits.softmax(1)}


def _loss_arguments(draw: Draw, deviation: float) -> Arguments:
    logits = draw.normal(512, _CLASSES, by=deviation)
    of_rows = _statistics(logits.double(), draw.index(_CLASSES, 512))
    return *(one.to(draw.wide) for one in of_rows), logits


def _gradient_arguments(draw: Draw, deviation: float) -> Arguments:
    input, head, target = _linear(draw, deviation)
    logits_max, sums, _ = (one.to(draw.wide) for one in _statistics(input.double() @ head.double().T, target))
    grad = draw.uniform(len(input), low=0.5, high=1.5).to(draw.wide)
    return grad, input, head, torch.zeros(len(input), dtype=torch.bool), target, logits_max, sums, None


def _torchs_gradients(grad: Tensor, input: Tensor, head: Tensor, _mask: Tensor, target: Tensor, *_: Any) -> Results:
    leaves = [tensor.detach().requires_grad_() for tensor in (input, head)]
    losses = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), target, reduction="none")
    return dict(zip(_GRADIENTS, torch.autograd.grad(losses, leaves, grad.to(losses.dtype)), strict=True))


def _loss_and_gradients(function: Callable[..., Tensor]) -> Callable[..., Results]:
    def call(input: Tensor, head: Tensor, target: Tensor, smoothing: float) -> Results:
        leaves = [tensor.detach().requires_grad_() for tensor in (input, head)]
        loss = function(*leaves, target, label_smoothing=smoothing)
        gradients = torch.autograd.grad(loss, leaves)
        return {"loss": loss.detach(), **dict(zip(_GRADIENTS, gradients, strict=True))}

    return call


def _torchs_linear_cross_entropy(input: Tensor, head: Tensor, target: Tensor, **options: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, head), target, **options)


def _whole_loss(distribution: str, draw: Callable[[Draw], Arguments]) -> Case:
    ours, torchs = map(_loss_and_gradients, (functional.linear_cross_entropy, _torchs_linear_cross_entropy))
    return Case("linear_cross_entropy", distribution, draw, ours, torchs, torchs)


def _linear_cross_entropies(distribution: str, by: float) -> list[Case]:
    max_sum, loss, gradients = (
        f"fused_{name}"
        for name in ("linear_online_max_sum", "cross_entropy_loss_with_max_sum", "linear_cross_entropy_loss_grad")
    )
    our_loss, our_gradients = _by_operator(_OURS, loss, "loss", "softmax"), _by_operator(_OURS, gradients, *_GRADIENTS)
    whole = f"{distribution}, mean of 4,096"
    return [
        Case(max_sum, distribution, lambda d: (*_linear(d, by), 0, _CLASSES, False), _max_sum, _torchs_max_sum),
        Case(loss, distribution, lambda d: _loss_arguments(d, by), our_loss, _torchs_loss),
        Case(gradients, distribution, lambda d: _gradient_arguments(d, by), our_gradients, _torchs_gradients),
        _whole_loss(whole, lambda d: (*_linear(d, by, rows=4096), 0.0)),
        _whole_loss(f"{whole}, smoothed by 0.1", lambda d: (*_linear(d, by, rows=4096), 0.1)),
    ]


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


def _step(distribution: str, moments: float, step: int) -> Case:
    def draw(draw: Draw) -> Arguments:
        grad, var, m = draw.normal(4096, by=moments), draw.normal(4096), draw.normal(4096, by=moments)
        v = draw.uniform(4096, high=moments**2)
        return grad, var, m, v, draw.normal(4096), torch.tensor([step])

    ours, torchs = map(_adam, (ops.apply_fused_ema_adam_, _torchs_adam))
    return Case("apply_fused_ema_adam_", distribution, draw, ours, torchs)


CASES: list[Case] = [
    *_of_aten(),
    *_linear_cross_entropies("logits of deviation 1", 1.0),
    *_linear_cross_entropies("wide logits, of deviation 30", 30.0),
    _whole_loss("the targets nearly certain, mean of 4,096", _certain),
    _step("normal gradients, step 10", 1.0, 10),
    _step("normal gradients, step 100,000", 1.0, 100_000),
    _step("tiny second moments (gradients of 1e-6), step 10", 1e-6, 10),
]
