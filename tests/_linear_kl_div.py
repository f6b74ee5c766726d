"""linear_kl_div as torch's functions compose it, with the logits of all rows."""

import math

import torch_aclnn_ops  # noqa: F401  isort: skip  (before torch, see torch_aclnn_ops/_torch_npu.py)
import torch
from torch.nn import functional as theirs

DIVERGENCES = {"forward_kl": {}, "reverse_kl": {}, "jensen_shannon": {"beta": 0.3}}
ROWS, FEATURES, WIDTH, CLASSES = 11, 6, 9, 23


def draw(*shape, seed=0, dtype=torch.float64):
    """Return numbers that are the same in every dtype."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.bfloat16().to(dtype)


def student(dtype=torch.float64, rows=(ROWS,), grad=True, first_seed=0):
    """Return rows, head and bias of a student."""
    shapes = ((*rows, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    return [draw(*shape, seed=seed, dtype=dtype).requires_grad_(grad) for seed, shape in enumerate(shapes, first_seed)]


def head_of_teacher(dtype=torch.float64, rows=(ROWS,), first_seed=10):
    """Return rows, head and bias of a teacher."""
    shapes = ((*rows, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    return [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes, first_seed)]


def log_probabilities(input, weight, bias=None, temperature=1.0):
    """Return those of a head."""
    return (theirs.linear(input, weight, bias) / temperature).log_softmax(-1)


def some_classes(log_probs, number):
    """Return the most probable classes and their log-probabilities."""
    values, indices = log_probs.topk(number, -1)
    return indices, values


def divergence_of(of_student, of_teacher, divergence, beta=0.5):
    """Return the divergence of every row, of log-probabilities."""

    def kl(one, other):
        return theirs.kl_div(other, one, reduction="none", log_target=True).sum(-1)

    if divergence == "forward_kl":
        return kl(of_teacher, of_student)
    if divergence == "reverse_kl":
        return kl(of_student, of_teacher)
    mixture = torch.stack([of_teacher + math.log(beta), of_student + math.log1p(-beta)]).logsumexp(0)
    return beta * kl(of_teacher, mixture) + (1 - beta) * kl(of_student, mixture)


def reduced(losses, reduction="mean", target=None, token_weight=None):
    """Reduce the losses of rows."""
    counts = torch.ones_like(losses) if target is None else (target != -100).to(losses.dtype)
    if token_weight is not None:
        counts = counts * token_weight
    losses = losses * counts
    return {"none": lambda: losses, "sum": losses.sum, "mean": lambda: losses.sum() / counts.sum()}[reduction]()
