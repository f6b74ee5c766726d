"""linear_kl_div, and the same composed of torch's functions, with the logits of all rows."""

import math
from functools import partial

from torch_aclnn_ops import functional as F

import torch
from torch import Tensor
from torch.nn import functional as theirs
from torch.utils._pytree import tree_map_only

DIVERGENCES = {"forward_kl": {}, "reverse_kl": {}, "jensen_shannon": {"beta": 0.3}}
ROWS, FEATURES, WIDTH, CLASSES = 11, 6, 9, 24
TARGET = torch.arange(ROWS)
TARGET[3] = TARGET[8] = -100


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
    """Return a head's log-probabilities."""
    return (theirs.linear(input, weight, bias) / temperature).log_softmax(-1)


def some_classes(log_probs, number):
    """Return the most probable classes and their log-probabilities."""
    values, indices = log_probs.topk(number, -1)
    return indices, values


# Arguments that describe a teacher, computed from its head and its log-probabilities.
TEACHERS = {
    "head": lambda head, _: dict(zip(("teacher_input", "teacher_weight", "teacher_bias"), head, strict=True)),
    "log-probabilities": lambda _, log_probs: {"teacher_log_probs": log_probs},
    "all classes as some": lambda _, log_probs: {"teacher_top_k": some_classes(log_probs, CLASSES)},
    "some classes": lambda _, log_probs: {"teacher_top_k": some_classes(log_probs, 4)},
}


def teacher(kind="head", head=None, temperature=1.0, **made):
    """Return the arguments of a teacher, by default of a new head."""
    head = head_of_teacher(**made) if head is None else head
    return TEACHERS[kind](head, log_probabilities(*head, temperature))


def loss_of(of_student, divergence="forward_kl", given=None, function=F.linear_kl_div, **options):
    """Return the loss for a student and a teacher's arguments, by default those of its head."""
    input, weight, bias = of_student
    given = teacher() if given is None else given
    options = {"linear_bias": bias, "divergence": divergence, **DIVERGENCES[divergence], **options}
    return function(input, weight, **given, **options)


def gradients(loss, of_student):
    """Return the student's gradients under a cotangent that is the same in every dtype."""
    return torch.autograd.grad(loss, of_student, draw(*loss.shape, seed=77).to(loss))


def results(of_student, divergence="forward_kl", given=None, **options):
    """Return the loss and its gradients."""
    loss = loss_of(of_student, divergence, given, **options)
    return [loss, *gradients(loss, of_student)]


def divergence_of(of_student, of_teacher, divergence, beta=0.5):
    """Return the divergence of every row, from log-probabilities."""

    def kl(one, other):
        return theirs.kl_div(other, one, reduction="none", log_target=True).sum(-1)

    if divergence == "forward_kl":
        return kl(of_teacher, of_student)
    if divergence == "reverse_kl":
        return kl(of_student, of_teacher)
    mixture = torch.stack([of_teacher + math.log(beta), of_student + math.log1p(-beta)]).logsumexp(0)
    return beta * kl(of_teacher, mixture) + (1 - beta) * kl(of_student, mixture)


def composed(
    input,
    linear_weight,
    teacher_input=None,
    teacher_weight=None,
    *,
    linear_bias=None,
    teacher_bias=None,
    teacher_log_probs=None,
    teacher_probs=None,
    teacher_top_k=None,
    divergence="forward_kl",
    beta=0.5,
    temperature=1.0,
    target=None,
    hard_weight=0.0,
    token_weight=None,
    reduction="mean",
    chunk_size=None,
):
    """Return the loss computed with torch's functions, in float32 for 16-bit heads."""
    logits = theirs.linear(input, linear_weight, linear_bias)
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    of_student = (logits / temperature).log_softmax(-1)
    if teacher_input is not None:
        of_teacher = log_probabilities(teacher_input, teacher_weight, teacher_bias, temperature)
    elif teacher_top_k is not None:
        indices, of_teacher = teacher_top_k
        of_student, of_teacher = _with_the_others_as_one(of_student, indices.long(), of_teacher)
    else:
        of_teacher = teacher_log_probs if teacher_probs is None else teacher_probs.log()
    losses = divergence_of(of_student, of_teacher.to(of_student.dtype), divergence, beta)
    if hard_weight:
        losses = losses + hard_weight * theirs.cross_entropy(logits, target, reduction="none")
    counts = torch.ones_like(losses) if target is None else (target != -100).to(losses.dtype)
    if token_weight is not None:
        counts = counts * token_weight
    losses = losses * counts
    return {"none": lambda: losses, "sum": losses.sum, "mean": lambda: losses.sum() / counts.sum()}[reduction]()


def _with_the_others_as_one(of_student, indices, of_teacher):
    """Return log-probabilities of some classes, and of all others together if there are others."""
    others = of_student.scatter(-1, indices, -math.inf).logsumexp(-1, True)
    of_some = of_student.gather(-1, indices)
    if indices.shape[-1] == of_student.shape[-1]:
        return of_some, of_teacher
    rest = torch.log1p(-of_teacher.exp().sum(-1, True))
    return torch.cat([of_some, others], -1), torch.cat([of_teacher, rest], -1)


REDUCED = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored rows": {"target": TARGET},
    "ignored rows, none": {"target": TARGET, "reduction": "none"},
    "token weights": {"token_weight": draw(ROWS, seed=5).abs()},
    "token weights and ignored rows": {"token_weight": draw(ROWS, seed=5).abs(), "target": TARGET, "reduction": "sum"},
    "hard labels": {"target": TARGET, "hard_weight": 0.7},
    "hard labels, none": {"target": TARGET, "hard_weight": 0.7, "reduction": "none"},
    "hard labels of all rows": {"target": TARGET.abs() % CLASSES, "hard_weight": 0.7},
}


def of_shard(vocabulary, divergence="reverse_kl", kind="head", options=REDUCED["mean"], **more):
    """Return the loss and its gradients for a shard of the vocabulary, with the names of _vocab_parallel.py."""
    here = vocabulary.classes
    input, weight, bias = student(vocabulary.dtype, grad=False)
    given = teacher(kind, dtype=vocabulary.dtype)
    given |= {name: given[name][here] for name in ("teacher_weight", "teacher_bias") if name in given}
    given |= {name: given[name][:, here] for name in ("teacher_log_probs",) if name in given}
    tensors = (input, weight[here].clone(), bias[here].clone()), given, options
    heads, given, options = tree_map_only(torch.Tensor, lambda one: one.to(vocabulary.device), tensors)
    options = {"temperature": 2.0, "chunk_size": 4, **options, **vocabulary.options, **more}
    found = results([one.requires_grad_() for one in heads], divergence, given, **options)
    return dict(zip(("copy.loss", "copy.input", "shard.weight", "shard.bias"), map(Tensor.detach, found), strict=True))


def without_sizes(vocabulary):
    """Without vocab_sizes."""
    vocabulary.options.pop("vocab_sizes", None)
    return of_shard(vocabulary)


def part_of_the_inputs_gradient(vocabulary):
    """The input's gradient left as this process's part of the sum."""
    found = of_shard(vocabulary, **({} if vocabulary.is_whole else {"reduce_input_grad": False}))
    return {"part.input": found.pop("copy.input")} | found


# A function of a vocabulary, how it is split, and the dtype.
CASES = {
    f"{divergence}, {kind}, {reduced}, {split}": (
        partial(of_shard, divergence=divergence, kind=kind, options=REDUCED[reduced]),
        split,
        "float64",
    )
    for divergence in DIVERGENCES
    for kind in ("head", "log-probabilities", "some classes")
    for reduced in ("mean", "ignored rows, none", "hard labels", "token weights and ignored rows")
    for split in (("uneven", "one class") if reduced in ("mean", "hard labels") else ("uneven",))
}
CASES |= {one.__name__: (one, "uneven", "float64") for one in (without_sizes, part_of_the_inputs_gradient)}
