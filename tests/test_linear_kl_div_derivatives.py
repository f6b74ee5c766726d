"""linear_kl_div: derivatives of every order and kind, transforms and compiled code."""

from functools import partial
from itertools import product

from torch_aclnn_ops import functional as F

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests._linear_kl_div import (
    CLASSES,
    DIVERGENCES,
    FEATURES,
    REDUCED,
    ROWS,
    TARGET,
    draw,
    gradients,
    head_of_teacher,
    loss_of,
    student,
    teacher,
    truth,
)

every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
each_teacher = pytest.mark.parametrize("kind", ["head", "log-probabilities", "some classes"])
PRODUCTS = ("aten::mm", "aten::addmm")


@every_divergence
@each_teacher
@pytest.mark.parametrize("options", ["mean", "none", "token weights and ignored rows", "hard labels, none"])
@pytest.mark.every_nth_case(12)
def test_first_and_second_derivatives_and_forward_mode_are_right(divergence, kind, options):
    options = {"given": teacher(kind), "chunk_size": 4, "temperature": 2.0, **REDUCED[options]}

    def function(*of_student):
        return loss_of(of_student, divergence, **options)

    assert gradcheck(function, student())
    assert gradcheck(function, student(), check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert gradgradcheck(function, student(), fast_mode=True)


def test_a_token_weight_has_a_derivative():
    token_weight = draw(ROWS, seed=5).abs().requires_grad_()
    for reduction in ("none", "mean", "sum"):
        loss = partial(loss_of, student(), reduction=reduction, target=TARGET)
        assert gradcheck(lambda token_weight, loss=loss: loss(token_weight=token_weight), token_weight)


@every_divergence
def test_forward_mode_and_transforms_are_right(divergence):
    of_student, given = student(grad=False), teacher()
    tangents = tuple(draw(*one.shape, seed=30 + i) for i, one in enumerate(of_student))

    def function(*arguments):
        return loss_of(arguments, divergence, given, chunk_size=4)

    expected, *of_loss = truth(of_student, head_of_teacher(), divergence)
    upstream = draw(seed=77)
    found = torch.func.grad(function, (0, 1, 2))(*of_student)
    torch.testing.assert_close([one * upstream for one in found], of_loss)
    loss, tangent = torch.func.jvp(function, tuple(of_student), tangents)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(tangent, sum((one * other).sum() for one, other in zip(found, tangents, strict=True)))
    inputs = draw(3, ROWS, FEATURES, seed=40)
    losses = torch.func.vmap(lambda one: function(one, *of_student[1:]))(inputs)
    torch.testing.assert_close(losses, torch.stack([function(one, *of_student[1:]) for one in inputs]))


@every_divergence
def test_the_forward_mode_derivative_where_no_class_is_left(divergence):
    input, *head = student(grad=False)
    function = partial(loss_of, divergence=divergence, given=teacher("all classes as some"))
    _, found = torch.func.jvp(lambda input: function((input, *head)), (input,), (torch.ones_like(input),))
    torch.testing.assert_close(found, torch.func.grad(lambda input: function((input, *head)))(input).sum())


def _products(profile):
    return sum(event.count for event in profile.key_averages() if event.key in PRODUCTS)


@pytest.mark.parametrize("needed", list(product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_only_gradients_that_are_needed_are_made(needed, reduction):
    of_student, given = student(), teacher()
    _, *expected = truth(of_student, head_of_teacher(), "jensen_shannon", reduction=reduction)
    for one, is_needed in zip(of_student, needed, strict=True):
        one.requires_grad_(is_needed)
    with torch.profiler.profile() as profile:
        loss = loss_of(of_student, "jensen_shannon", given, reduction=reduction)
        assert loss.requires_grad == any(needed)
        if any(needed):
            loss.backward(draw(*loss.shape, seed=77))
    for one, gradient, is_needed in zip(of_student, expected, needed, strict=True):
        assert one.grad is None if not is_needed else torch.allclose(one.grad, gradient)
    recomputed = 2 if reduction == "none" and any(needed) else 0
    assert _products(profile) == 2 + recomputed + sum(needed[:2])


@each_teacher
@pytest.mark.parametrize("options", ["ignored rows", "ignored rows, none", "hard labels"])
@pytest.mark.every_nth_case(4)
def test_compiled_code_gives_the_results_of_eager_code_in_one_graph(options, kind):
    of_student, given = student(torch.float32), teacher(kind, dtype=torch.float32)

    def function(*of_student):
        return loss_of(of_student, "reverse_kl", given, temperature=2.0, **REDUCED[options]).square().sum()

    eager, compiled = function(*of_student), torch.compile(function, fullgraph=True, backend="aot_eager")(*of_student)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradients(compiled, of_student), gradients(eager, of_student))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_with_a_teachers_head_takes_any_number_of_rows(dynamic):
    (input, weight, _), (rows, head, _) = student(torch.float32), head_of_teacher(torch.float32)
    compiled = torch.compile(F.linear_kl_div, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for number in (4, 7, 3):
        given = input[:number], weight, rows[:number], head
        torch.testing.assert_close(compiled(*given), F.linear_kl_div(*given))


def test_a_label_out_of_range_is_refused_or_makes_its_row_nan_where_values_are_not_read():
    target, given = TARGET.clone(), teacher()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for label in (-1, CLASSES):
        target[2] = label
        options = {"given": given, "target": target, "hard_weight": 0.7}
        message = f"^linear_kl_div: target must have labels from 0 to 22, .* it has {label}$"
        with pytest.raises(IndexError, match=message):
            loss_of(student(), **options)
        assert compiled(student(), **options, reduction="none").isnan().nonzero().tolist() == [[2]]


def test_a_tangent_of_the_teacher_is_refused():
    (input, weight, _), (rows, head, _) = student(grad=False), head_of_teacher()

    def function(rows):
        return F.linear_kl_div(input, weight, rows, head)

    with pytest.raises(RuntimeError, match="teacher_input must not require grad.* it has a tangent"):
        torch.func.jvp(function, (rows,), (rows,))
    with pytest.raises(RuntimeError, match="teacher_input must not require grad"):
        torch.func.grad(function)(rows)


def test_a_teacher_that_is_trained_is_taken_under_no_grad():
    rows, head, bias = head_of_teacher()
    with torch.no_grad():
        assert loss_of(student(), given=teacher(head=(rows, head.requires_grad_(), bias))).isfinite()
