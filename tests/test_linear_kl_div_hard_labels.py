"""linear_kl_div with ``hard_weight``: the cross entropy of the labels beside the divergence, from the same logits."""

from functools import partial

from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy, linear

from tests._linear_kl_div import (
    CLASSES,
    DIVERGENCES,
    ROWS,
    divergence_of,
    draw,
    head_of_teacher,
    log_probabilities,
    reduced,
    some_classes,
    student,
)

TARGET = torch.arange(ROWS)
TARGET[3] = TARGET[8] = -100
WEIGHT = 0.7
REDUCTIONS = {
    "mean": {"target": TARGET},
    "none": {"target": TARGET, "reduction": "none"},
    "weighted sum": {"target": TARGET, "reduction": "sum", "token_weight": draw(ROWS, seed=5).abs()},
    "no ignored rows": {"target": TARGET.abs() % CLASSES},
}
TEACHERS = ("head", "log-probabilities", "some classes")


def _given(teacher, dtype=torch.float64):
    rows, head, bias = head_of_teacher(dtype)
    log_probs = log_probabilities(rows, head, bias)
    return {
        "head": {"teacher_input": rows, "teacher_weight": head, "teacher_bias": bias},
        "log-probabilities": {"teacher_log_probs": log_probs},
        "some classes": {"teacher_top_k": some_classes(log_probs, 4)},
    }[teacher]


def _loss(input, weight, bias, divergence="forward_kl", teacher="head", given=None, **options):
    given = _given(teacher, input.dtype) if given is None else given
    options = {"hard_weight": WEIGHT, "target": TARGET, **DIVERGENCES[divergence], **options}
    return F.linear_kl_div(input, weight, linear_bias=bias, divergence=divergence, **given, **options)


def _gradients(loss, of_student):
    return torch.autograd.grad(loss, of_student, draw(*loss.shape, seed=77).to(loss.dtype))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("cut", [{}, {"chunk_size": 4}, {"max_memory": 6000}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("options", REDUCTIONS)
def test_the_loss_is_the_divergence_and_the_cross_entropy_of_torch(divergence, cut, temperature, options):
    of_student, (rows, head, its_bias), options = student(), head_of_teacher(), REDUCTIONS[options]
    loss = _loss(*of_student, divergence, temperature=temperature, **options, **cut)
    soft = divergence_of(
        log_probabilities(*of_student, temperature),
        log_probabilities(rows, head, its_bias, temperature),
        divergence,
        **DIVERGENCES[divergence],
    )
    hard = cross_entropy(linear(*of_student), options["target"], reduction="none")
    expected = reduced(soft + WEIGHT * hard, **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(_gradients(loss, of_student), _gradients(expected, of_student))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("teacher", TEACHERS[1:])
def test_a_teachers_numbers_are_beside_the_labels_too(divergence, teacher):
    of_student = student()
    soft = _loss(*of_student, divergence, teacher, hard_weight=0.0)
    expected = soft + WEIGHT * cross_entropy(linear(*of_student), TARGET)
    loss = _loss(*of_student, divergence, teacher, chunk_size=3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(_gradients(loss, of_student), _gradients(expected, of_student))


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_first_and_second_derivatives_are_right(teacher, reduction):
    function = partial(_loss, teacher=teacher, divergence="jensen_shannon", temperature=2.0, reduction=reduction)
    assert gradcheck(function, student()) and gradgradcheck(function, student())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_in_lower_precision_are_small(dtype):
    of_student = student(dtype)
    loss = _loss(*of_student, "reverse_kl", temperature=2.0)
    exact = [one.detach().double().requires_grad_() for one in of_student]
    wanted = _loss(*exact, "reverse_kl", temperature=2.0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-3}
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    found, expected = torch.autograd.grad(loss, of_student), torch.autograd.grad(wanted, exact)
    torch.testing.assert_close([one.double() for one in found], list(expected), **tolerance)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_compiled_code_gives_the_results_of_eager_code_in_one_graph(teacher):
    of_student = student(torch.float32)
    function = partial(_loss, given=_given(teacher, torch.float32), temperature=2.0)
    eager, compiled = function(*of_student), torch.compile(function, fullgraph=True, backend="aot_eager")(*of_student)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(_gradients(compiled, of_student), _gradients(eager, of_student))


def test_labels_may_stand_behind_their_rows():
    shape = (2, ROWS)
    of_student, (rows, head, _) = student(rows=shape), head_of_teacher(rows=shape)
    target = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(0))
    call = partial(F.linear_kl_div, linear_weight=of_student[1], teacher_weight=head, hard_weight=WEIGHT)
    found = call(of_student[0], teacher_input=rows, target=target, shift=True)
    expected = call(of_student[0][:, :-1], teacher_input=rows[:, :-1], target=target[:, 1:])
    torch.testing.assert_close(found, expected)


def test_the_logits_are_made_once():
    input, weight, _ = student()
    (rows, head, _), options = head_of_teacher(), {"target": TARGET, "hard_weight": WEIGHT}
    with torch.profiler.profile() as profile:
        F.linear_kl_div(input, weight, rows, head, **options).backward()
    products = [one.count for one in profile.key_averages() if one.key in ("aten::mm", "aten::addmm")]
    with torch.profiler.profile() as profile:
        F.linear_kl_div(input, weight, rows, head, target=TARGET).backward()
    assert products == [one.count for one in profile.key_averages() if one.key in ("aten::mm", "aten::addmm")]


def test_a_label_out_of_range_is_refused_or_makes_its_row_nan_where_values_are_not_read():
    of_student, target, given = student(), TARGET.clone(), _given("head")
    message = "^linear_kl_div: target must have labels from 0 to 22, .* it has"
    for label in (-1, CLASSES):
        target[2] = label
        with pytest.raises(IndexError, match=f"{message} {label}$"):
            _loss(*of_student, target=target)
        compiled = torch.compile(_loss, fullgraph=True, backend="aot_eager")
        loss = compiled(*of_student, target=target, reduction="none", given=given)
        assert loss.isnan().nonzero().tolist() == [[2]]


def test_the_module_takes_the_weight():
    (input, weight, _), (rows, head, _) = student(), head_of_teacher()
    found = nn.LinearKLDivLoss(hard_weight=WEIGHT)(input, weight, rows, head, target=TARGET)
    assert found == F.linear_kl_div(input, weight, rows, head, target=TARGET, hard_weight=WEIGHT)


ERROR_INPUTS = {
    "no labels": ({"target": None}, ValueError, "hard_weight must be 0 without target, but it is 0.7"),
    "negative": ({"hard_weight": -1.0}, ValueError, "hard_weight must be at least 0 and finite, but it is -1.0"),
    "no number": ({"hard_weight": True}, TypeError, "hard_weight must be a number, but it is True"),
}


@pytest.mark.parametrize("name", ERROR_INPUTS)
def test_invalid_arguments_raise_a_clear_error(name):
    options, error, message = ERROR_INPUTS[name]
    with pytest.raises(error, match=f"^linear_kl_div: {message}"):
        _loss(*student(), **options)
