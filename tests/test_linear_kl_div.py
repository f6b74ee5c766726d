"""linear_kl_div: the divergence of a student's and a teacher's head, without the logits of all rows."""

import math
import statistics
from itertools import product

import torch_aclnn_ops
from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests._linear_kl_div import (
    CLASSES,
    DIVERGENCES,
    FEATURES,
    ROWS,
    divergence_of,
    draw,
    head_of_teacher,
    log_probabilities,
    reduced,
    some_classes,
    student,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TARGET = torch.arange(ROWS)
TARGET[3] = TARGET[8] = -100

REDUCED = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored rows": {"target": TARGET},
    "ignored rows, none": {"target": TARGET, "reduction": "none"},
    "token weights": {"token_weight": draw(ROWS, seed=5).abs()},
    "token weights and ignored rows": {"token_weight": draw(ROWS, seed=5).abs(), "target": TARGET, "reduction": "sum"},
}
CUTS = {"auto": {}, "chunks of 4": {"chunk_size": 4}, "one row": {"chunk_size": 1}, "max_memory": {"max_memory": 4000}}

every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


def truth(of_student, of_teacher, divergence, temperature=1.0, **options):
    """The loss and its gradients in float64, from logits of all rows."""
    arguments = [one.detach().double().requires_grad_() for one in of_student]
    losses = divergence_of(
        log_probabilities(*arguments, temperature),
        log_probabilities(*(one.double() for one in of_teacher), temperature),
        divergence,
        **DIVERGENCES[divergence],
    )
    loss = reduced(losses, **options)
    return [loss, *torch.autograd.grad(loss, arguments, _upstream(loss))]


def _upstream(loss):
    return draw(*loss.shape, seed=77).to(loss.dtype)


def _call(of_student, of_teacher, divergence, **options):
    input, weight, bias = of_student
    rows, head, its_bias = of_teacher
    return F.linear_kl_div(
        *(input, weight, rows, head),
        linear_bias=bias,
        teacher_bias=its_bias,
        divergence=divergence,
        **DIVERGENCES[divergence],
        **options,
    )


def results(of_student, of_teacher, divergence, **options):
    loss = _call(of_student, of_teacher, divergence, **options)
    return [loss, *torch.autograd.grad(loss, of_student, _upstream(loss))]


def _error(found, expected):
    return float(
        (found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max().clamp(min=1e-3)
    )


@every_divergence
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("options", REDUCED)
def test_loss_and_gradients_are_those_of_torchs_composition(divergence, options, temperature, cut):
    arguments = student(), head_of_teacher(), divergence
    found = results(*arguments, temperature=temperature, **REDUCED[options], **CUTS[cut])
    torch.testing.assert_close(found, truth(*arguments, temperature=temperature, **REDUCED[options]))


@every_divergence
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("options", ["mean", "none", "token weights and ignored rows"])
@pytest.mark.every_nth_case(4)
def test_errors_are_those_of_torchs_composition_on_average(divergence, dtype, options):
    ours, torchs = [], []
    for seed in range(0, 4800, 100):
        of_student, of_teacher = student(dtype, first_seed=seed), head_of_teacher(dtype, first_seed=seed + 10)
        expected = truth(of_student, of_teacher, divergence, **REDUCED[options])
        losses = divergence_of(
            log_probabilities(*of_student), log_probabilities(*of_teacher), divergence, **DIVERGENCES[divergence]
        )
        loss = reduced(losses, **REDUCED[options])
        composed = [loss, *torch.autograd.grad(loss, of_student, _upstream(loss).to(loss.dtype))]
        found = results(of_student, of_teacher, divergence, chunk_size=4, **REDUCED[options])
        assert found[0].dtype == torch.float32 and [one.dtype for one in found[1:]] == [dtype] * 3
        ours.append([_error(*pair) for pair in zip(found, expected, strict=True)])
        torchs.append([_error(*pair) for pair in zip(composed, expected, strict=True)])
    for mine, theirs in zip(zip(*ours, strict=True), zip(*torchs, strict=True), strict=True):
        rounding = torch.finfo(dtype).eps / 2  # of the result
        assert statistics.mean(mine) <= 1.25 * statistics.mean(theirs) + rounding


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@every_divergence
def test_ignored_rows_have_no_part_in_16_bit_gradients(divergence, dtype, reduction):
    options = {"target": TARGET, "reduction": reduction}
    of_student, of_teacher = student(dtype), head_of_teacher(dtype)
    expected = truth(of_student, of_teacher, divergence, **options)
    for found, wide in zip(results(of_student, of_teacher, divergence, **options), expected, strict=True):
        torch.testing.assert_close(found.double(), wide.detach(), rtol=0.05, atol=0.05)


@every_divergence
def test_the_sums_of_many_16_bit_rows_are_rounded_once(divergence):
    input, weight = draw(400, 8, seed=1, dtype=torch.bfloat16), draw(30, 8, seed=2, dtype=torch.bfloat16)
    weight.requires_grad_()
    teacher = draw(400, 30, seed=3).log_softmax(1)
    options = {"teacher_log_probs": teacher, "divergence": divergence, "reduction": "sum"}
    (found,) = torch.autograd.grad(F.linear_kl_div(input, weight, chunk_size=8, **options), weight)
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear_kl_div(input.double(), wide, **options), wide)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-4)
    assert _error(found, expected) <= 2**-8


TEACHERS = {
    "log-probabilities": lambda log_probs: {"teacher_log_probs": log_probs},
    "probabilities": lambda log_probs: {"teacher_probs": log_probs.exp()},
    "all classes as some": lambda log_probs: {"teacher_top_k": some_classes(log_probs, CLASSES)},
}


@every_divergence
@pytest.mark.parametrize("options", ["mean", "ignored rows, none"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_teachers_numbers_stand_for_its_head(teacher, options, divergence):
    input, weight, bias = of_student = student()
    of_teacher = head_of_teacher()
    given = TEACHERS[teacher](log_probabilities(*of_teacher, 2.0))
    options = {"temperature": 2.0, "chunk_size": 4, **REDUCED[options]}
    expected = results(of_student, of_teacher, divergence, **options)
    loss = F.linear_kl_div(
        input, weight, linear_bias=bias, divergence=divergence, **DIVERGENCES[divergence], **given, **options
    )
    found = [loss, *torch.autograd.grad(loss, of_student, _upstream(loss))]
    torch.testing.assert_close(found, expected)


@every_divergence
@pytest.mark.parametrize("teacher", TEACHERS)
def test_the_formula_leaves_out_ignored_rows_whatever_the_teacher_is(teacher, divergence):
    given = TEACHERS[teacher](log_probabilities(*head_of_teacher()))

    def loss(input, weight, bias):
        options = {"divergence": divergence, "target": TARGET, **DIVERGENCES[divergence], **given}
        return F.linear_kl_div(input, weight, linear_bias=bias, **options)

    of_student = student()
    expected = torch.autograd.grad(loss(*of_student), of_student)
    of_formula = torch.func.grad(loss, (0, 1, 2))(*(one.detach() for one in of_student))
    torch.testing.assert_close(of_formula, expected)


@every_divergence
def test_some_classes_are_compared_with_all_others_as_one(divergence):
    of_student = student()
    of_teacher = log_probabilities(*head_of_teacher())
    indices, values = some_classes(of_teacher, 4)
    rest = torch.zeros(ROWS, CLASSES, dtype=torch.bool).scatter(1, indices, True)

    def grouped(log_probs):
        return torch.cat([log_probs.gather(1, indices), log_probs.masked_fill(rest, -math.inf).logsumexp(1, True)], 1)

    expected = divergence_of(
        grouped(log_probabilities(*of_student)), grouped(of_teacher), divergence, **DIVERGENCES[divergence]
    ).mean()
    input, weight, bias = of_student
    found = F.linear_kl_div(
        *(input, weight),
        linear_bias=bias,
        teacher_top_k=(indices.int(), values),
        divergence=divergence,
        chunk_size=3,
        **DIVERGENCES[divergence],
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, of_student), torch.autograd.grad(expected, of_student))


@every_divergence
@pytest.mark.parametrize("gap", [20.0, 100.0])
def test_other_classes_that_the_student_finds_very_unlikely_have_gradients(divergence, gap):
    def gradients(dtype):
        input, weight, bias = (one.detach().to(dtype).requires_grad_() for one in student())
        some = some_classes(log_probabilities(*head_of_teacher()), 4)
        # An offset of the bias that all top-k classes of a row share, as one row has.
        indices, values = some[0][:1], some[1][:1].to(dtype)
        shifted = bias.index_add(0, indices[0], torch.full((4,), gap, dtype=dtype))
        options = {"linear_bias": shifted, "teacher_top_k": (indices, values), **DIVERGENCES[divergence]}
        loss = F.linear_kl_div(input[:1], weight, divergence=divergence, **options)
        return torch.autograd.grad(loss, (input, weight, bias))

    for found, expected in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_the_forward_kl_of_some_renormalized_classes_leaves_the_others_out():
    input, weight, bias = student()
    indices, values = some_classes(log_probabilities(*head_of_teacher()), 4)
    values = values - values.logsumexp(1, keepdim=True)
    at_classes = log_probabilities(input, weight, bias).gather(1, indices)
    expected = (values.exp() * (values - at_classes)).sum(1).mean()
    found = F.linear_kl_div(input, weight, linear_bias=bias, teacher_top_k=(indices, values))
    torch.testing.assert_close(found, expected)


@every_divergence
@pytest.mark.parametrize("options", ["mean", "none", "token weights and ignored rows"])
@pytest.mark.every_nth_case(5)
def test_first_and_second_derivatives_are_right(divergence, options):
    of_teacher, options = head_of_teacher(), {"chunk_size": 4, "temperature": 2.0, **REDUCED[options]}

    def function(*of_student):
        return _call(of_student, of_teacher, divergence, **options)

    assert gradcheck(function, student())
    assert gradgradcheck(function, student())


def test_derivatives_of_some_classes_are_right():
    some = some_classes(log_probabilities(*head_of_teacher()), 4)

    def function(input, weight, bias):
        return F.linear_kl_div(input, weight, linear_bias=bias, teacher_top_k=some, divergence="jensen_shannon")

    assert gradcheck(function, student())
    assert gradgradcheck(function, student())
    assert gradcheck(function, student(), check_forward_ad=True, check_backward_ad=False)


def test_a_token_weight_has_a_derivative():
    token_weight = draw(ROWS, seed=5).abs().requires_grad_()
    for reduction in ("none", "mean", "sum"):

        def function(token_weight):
            options = {"reduction": reduction, "target": TARGET}  # noqa: B023
            return _call(student(), head_of_teacher(), "forward_kl", token_weight=token_weight, **options)

        assert gradcheck(function, token_weight)


@every_divergence
def test_forward_mode_and_transforms_are_right(divergence):
    of_student, of_teacher = student(grad=False), head_of_teacher()
    tangents = tuple(draw(*one.shape, seed=30 + i) for i, one in enumerate(of_student))

    def function(*arguments):
        return _call(arguments, of_teacher, divergence, chunk_size=4)

    expected = truth(of_student, of_teacher, divergence)
    upstream = _upstream(expected[0])
    gradients = torch.func.grad(function, (0, 1, 2))(*of_student)
    torch.testing.assert_close([one * upstream for one in gradients], expected[1:])
    loss, tangent = torch.func.jvp(function, tuple(of_student), tangents)
    torch.testing.assert_close(loss, expected[0].detach())
    by_gradients = sum((one * other).sum() for one, other in zip(gradients, tangents, strict=True))
    torch.testing.assert_close(tangent, by_gradients)
    inputs = draw(3, ROWS, FEATURES, seed=40)
    losses = torch.func.vmap(lambda one: function(one, *of_student[1:]))(inputs)
    torch.testing.assert_close(losses, torch.stack([function(one, *of_student[1:]) for one in inputs]))


def test_gradients_that_are_batched_are_those_of_each():
    of_student, of_teacher = student(), head_of_teacher()
    for reduction in ("none", "mean"):
        loss = _call(of_student, of_teacher, "reverse_kl", reduction=reduction)
        upstream = draw(3, *loss.shape, seed=9)
        found = torch.autograd.grad(loss, of_student, upstream, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(loss, of_student, one, retain_graph=True) for one in upstream]
        torch.testing.assert_close(list(found), [torch.stack(column) for column in zip(*each, strict=True)])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_retained_graph_gives_its_gradients_again(reduction):
    of_student = student()
    loss = _call(of_student, head_of_teacher(), "reverse_kl", reduction=reduction)
    first = torch.autograd.grad(loss, of_student, _upstream(loss), retain_graph=True)
    again = torch.autograd.grad(loss, of_student, _upstream(loss) * 2)
    torch.testing.assert_close(again, [2 * one for one in first])


@pytest.mark.parametrize("needed", list(product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_only_gradients_that_are_needed_are_made(needed, reduction):
    of_student, of_teacher = student(), head_of_teacher()
    _, *expected = truth(of_student, of_teacher, "jensen_shannon", reduction=reduction)
    for one, is_needed in zip(of_student, needed, strict=True):
        one.requires_grad_(is_needed)
    with torch.profiler.profile() as profile:
        loss = _call(of_student, of_teacher, "jensen_shannon", reduction=reduction)
        assert loss.requires_grad == any(needed)
        if any(needed):
            loss.backward(_upstream(loss))
    for one, gradient, is_needed in zip(of_student, expected, needed, strict=True):
        assert one.grad is None if not is_needed else torch.allclose(one.grad, gradient)
    products = sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    recomputed = 2 if reduction == "none" and any(needed) else 0
    assert products == 2 + recomputed + sum(needed[:2])


def test_a_loss_under_no_grad_makes_no_gradient():
    with torch.no_grad(), torch.profiler.profile() as profile:
        assert not _call(student(), head_of_teacher(), "forward_kl").requires_grad
    assert sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")) == 2


SHAPES = {"one row": (), "no rows": (0,), "a batch": (2, 5), "an empty batch": (0, 4), "three dimensions": (2, 3, 2)}


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_may_have_any_number_of_dimensions(shape, reduction):
    of_student, of_teacher = student(rows=SHAPES[shape]), head_of_teacher(rows=SHAPES[shape])
    found = results(of_student, of_teacher, "reverse_kl", reduction=reduction)
    expected = truth(of_student, of_teacher, "reverse_kl", reduction=reduction)
    assert found[0].shape == expected[0].shape
    is_empty = 0 in SHAPES[shape]
    if is_empty and reduction == "mean":
        assert found[0].isnan() and not any(one.any() for one in found[1:])
    else:
        torch.testing.assert_close(found, expected)


def test_arguments_need_not_be_contiguous():
    of_student, of_teacher = student(), head_of_teacher()
    expected = results(of_student, of_teacher, "reverse_kl")
    strided = [torch.stack([one.detach(), one.detach()], -1)[..., 0].requires_grad_() for one in of_student]
    transposed = [one.T.contiguous().T for one in of_teacher[:2]]
    torch.testing.assert_close(results(strided, [*transposed, of_teacher[2]], "reverse_kl"), expected)


def test_a_uint8_label_is_not_that_of_ignored_rows():
    target = torch.full((ROWS,), 156, dtype=torch.uint8)  # -100 in 8 bits
    found = _call(student(), head_of_teacher(), "forward_kl", target=target, reduction="none")
    torch.testing.assert_close(found, _call(student(), head_of_teacher(), "forward_kl", reduction="none"))


def test_labels_may_stand_behind_their_rows():
    of_student, of_teacher = student(rows=(2, 5)), head_of_teacher(rows=(2, 5))
    target = torch.tensor([[7, 3, -100, 4, 5], [-100, 1, 2, 3, -100]])
    token_weight = draw(2, 5, seed=3).abs()
    options = {"target": target, "token_weight": token_weight, "reduction": "none"}
    found = _call(of_student, of_teacher, "forward_kl", shift=True, **options)
    plain = _call(of_student, of_teacher, "forward_kl", reduction="none")
    expected = torch.zeros(2, 5, dtype=torch.float64)
    expected[:, 1:] = plain[:, :-1] * token_weight[:, 1:] * (target[:, 1:] != -100)
    torch.testing.assert_close(found, expected)


def test_a_mean_over_no_rows_is_nan_or_0_as_the_caller_wants_and_its_gradients_are_0():
    target = torch.full((ROWS,), 7)
    for is_zero in (False, True):
        of_student = student()
        loss = _call(
            of_student, head_of_teacher(), "forward_kl", target=target, ignore_index=7, zero_if_all_ignored=is_zero
        )
        assert loss == 0 if is_zero else loss.isnan()
        assert not any(one.any() for one in torch.autograd.grad(loss, of_student))


def test_what_is_not_finite_in_an_ignored_row_stays_there():
    of_student, of_teacher = student(), head_of_teacher()
    expected = results(of_student, of_teacher, "jensen_shannon", target=TARGET)
    with torch.no_grad():
        of_student[0][3], of_teacher[0][3] = math.nan, math.inf
    torch.testing.assert_close(results(of_student, of_teacher, "jensen_shannon", target=TARGET), expected)


@every_divergence
@pytest.mark.parametrize("order", ["first", "second"])
def test_classes_that_both_mask_have_no_part(divergence, order):
    of_student, of_teacher = student(), head_of_teacher()
    few = [one[:-3] if one.shape[0] == CLASSES else one for one in of_student]
    with torch.no_grad():
        of_student[2][-3:], of_teacher[2][-3:] = -math.inf, -math.inf
    loss = _call(of_student, of_teacher, divergence)
    expected = _call(few, [one[:-3] if one.shape[0] == CLASSES else one for one in of_teacher], divergence)
    torch.testing.assert_close(loss, expected)
    create_graph = order == "second"
    found = torch.autograd.grad(loss, of_student[:2], create_graph=create_graph)
    torch.testing.assert_close(found, torch.autograd.grad(expected, of_student[:2]))
    if create_graph:
        assert torch.autograd.grad(found[0].sum(), of_student[0])[0].isfinite().all()


def test_a_class_that_the_student_gives_no_probability_makes_the_forward_kl_infinite():
    of_student = student()
    with torch.no_grad():
        of_student[2][0] = -math.inf
    assert _call(of_student, head_of_teacher(), "forward_kl") == math.inf
    assert _call(of_student, head_of_teacher(), "reverse_kl").isfinite()


def test_the_teacher_may_have_another_dtype():
    of_student, of_teacher = student(torch.float32), head_of_teacher(torch.bfloat16)
    expected = results(of_student, [one.float() for one in of_teacher], "forward_kl")
    torch.testing.assert_close(results(of_student, of_teacher, "forward_kl"), expected)


def test_autocast_multiplies_in_16_bits_and_leaves_the_loss_in_float32():
    of_student, of_teacher = student(torch.float32), head_of_teacher(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _call(of_student, of_teacher, "reverse_kl")
    gradients = torch.autograd.grad(loss, of_student)
    rounded = [one.detach().bfloat16().requires_grad_() for one in of_student]
    expected = _call(rounded, [one.bfloat16() for one in of_teacher], "reverse_kl")
    torch.testing.assert_close(loss, expected)
    assert loss.dtype == torch.float32 and {one.dtype for one in gradients} == {torch.float32}
    torch.testing.assert_close(gradients, [one.float() for one in torch.autograd.grad(expected, rounded)])


def test_max_memory_bounds_the_logits_and_too_little_is_refused_before_any_work():
    input, weight = draw(512, 8, dtype=torch.float32), draw(1000, 8, dtype=torch.float32).requires_grad_()
    said = torch_aclnn_ops.explain(F.linear_kl_div, input, weight, input, weight.detach(), max_memory=500_000)
    assert float(said.split(", ")[-1].removesuffix(" MB of buffers")) <= 0.5 and "chunks of" in said
    with pytest.raises(ValueError, match=r"^linear_kl_div: max_memory must be at least \d+ bytes .* it is 1000$"):
        F.linear_kl_div(input, weight, input, weight.detach(), max_memory=1000)


def test_no_forward_or_first_backward_pass_holds_the_logits_of_all_rows():
    rows, classes = 600, 500
    input, weight = draw(rows, 4, dtype=torch.float32), draw(classes, 4, dtype=torch.float32).requires_grad_()
    for reduction in ("mean", "none"):
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = F.linear_kl_div(input, weight, input, weight.detach(), reduction=reduction, max_memory=100_000)
            loss.sum().backward()
        found = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        most = max(abs(event.nbytes()) for event in found)
        assert most < rows * classes * 4 / 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("teacher", ["head", "some classes"])
@pytest.mark.every_nth_case(3)
def test_compiled_code_gives_the_results_of_eager_code_in_one_graph(reduction, teacher):
    of_student, of_teacher = student(torch.float32), head_of_teacher(torch.float32)
    some = some_classes(log_probabilities(*of_teacher), 4)

    def function(input, weight, bias):
        if teacher == "head":
            return _call((input, weight, bias), of_teacher, "reverse_kl", reduction=reduction, target=TARGET)
        return F.linear_kl_div(input, weight, linear_bias=bias, teacher_top_k=some, reduction=reduction, target=TARGET)

    eager, compiled = function(*of_student), torch.compile(function, fullgraph=True, backend="aot_eager")(*of_student)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.square().sum(), of_student), torch.autograd.grad(eager.square().sum(), of_student)
    )


def test_compiled_code_with_a_teachers_head_takes_any_number_of_rows():
    (input, weight, _), (rows, head, _) = student(torch.float32), head_of_teacher(torch.float32)
    compiled = torch.compile(F.linear_kl_div, fullgraph=True, backend="aot_eager")
    for number in (4, 7, 3):
        given = input[:number], weight, rows[:number], head
        torch.testing.assert_close(compiled(*given), F.linear_kl_div(*given))


def test_meta_tensors_have_the_results_shapes():
    of_student = [one.to("meta").detach().requires_grad_() for one in student(torch.bfloat16)]
    of_teacher = [one.to("meta") for one in head_of_teacher(torch.bfloat16)]
    loss = _call(of_student, of_teacher, "forward_kl", reduction="none")
    assert loss.shape == (ROWS,) and loss.dtype == torch.float32
    assert torch.autograd.grad(loss.sum(), of_student)[1].shape == (CLASSES, FEATURES)


@pytest.mark.parametrize(("beta", "divergence"), [(0, "forward_kl"), (1.0, "reverse_kl")])
def test_a_jensen_shannon_divergence_of_one_distribution_is_the_kl_as_in_trl(beta, divergence):
    of_student, (rows, head, its_bias) = student(), head_of_teacher()
    input, weight, bias = of_student
    arguments = {"linear_bias": bias, "teacher_bias": its_bias}
    loss = F.linear_kl_div(input, weight, rows, head, divergence="jensen_shannon", beta=beta, **arguments)
    found = [loss, *torch.autograd.grad(loss, of_student, _upstream(loss))]
    torch.testing.assert_close(found, truth(of_student, (rows, head, its_bias), divergence))


@every_divergence
@pytest.mark.parametrize("teacher", ["head", "probabilities", "some classes"])
def test_padded_classes_of_both_heads_do_not_count(divergence, teacher):
    of_student, (rows, head, its_bias) = student(), head_of_teacher()
    log_probs = log_probabilities(rows, head, its_bias)
    given = {
        "head": {"teacher_input": rows, "teacher_weight": head, "teacher_bias": its_bias},
        "probabilities": {"teacher_log_probs": log_probs},
        "some classes": {"teacher_top_k": some_classes(log_probs, 4)},
    }[teacher]
    dims = {"teacher_weight": 0, "teacher_bias": 0, "teacher_log_probs": 1}
    long = {
        name: torch.cat([one, one.narrow(dims[name], 0, 2) + 3], dims[name]) if name in dims else one
        for name, one in given.items()
    }
    options = {"divergence": divergence, **DIVERGENCES[divergence]}

    def call(student, given, **more):
        input, weight, bias = student
        loss = F.linear_kl_div(input, weight, linear_bias=bias, **given, **options, **more)
        return [loss, *torch.autograd.grad(loss, student)]

    input, weight, bias = of_student
    wide = [input, *(torch.cat([one, one[:5]]).detach().requires_grad_() for one in (weight, bias))]
    expected = call(of_student, given)
    loss, *found = call(wide, long, vocab_size=CLASSES)
    torch.testing.assert_close(
        [loss, *(one[: len(wanted)] for one, wanted in zip(found, expected[1:], strict=True))], expected
    )
    assert not found[1][CLASSES:].any() and not found[2][CLASSES:].any()


def test_explain_says_that_no_operator_of_cann_serves_it():
    said = torch_aclnn_ops.explain(_call, student(), head_of_teacher(), "forward_kl")
    assert said.startswith("linear_kl_div: PyTorch fallback, because the tensors are on cpu; gradients with the")


def test_the_module_keeps_the_options_of_the_function():
    (input, weight, _), (rows, head, _) = student(), head_of_teacher()
    options = {"divergence": "jensen_shannon", "beta": 0.25, "temperature": 2.0, "reduction": "sum", "chunk_size": 4}
    module = nn.LinearKLDivLoss(**options)
    found = module(input, weight, rows, head, target=TARGET)
    assert torch.equal(found, F.linear_kl_div(input, weight, rows, head, target=TARGET, **options))
    assert "jensen_shannon" in repr(module) and "max_memory" not in repr(module)


X, W, T, H = torch.ones(3, 2), torch.ones(4, 2), torch.ones(3, 5), torch.ones(4, 5)
HEADS = {"input": X, "linear_weight": W, "teacher_input": T, "teacher_weight": H}
NUMBERS = {"input": X, "linear_weight": W}
TOP = (torch.tensor([[0, 1]] * 3), torch.full((3, 2), -1.0))
REFUSALS = {
    "divergence": ({**HEADS, "divergence": "kl"}, ValueError, "divergence must be one of 'forward_kl', .*'kl'"),
    "reduction": ({**HEADS, "reduction": "batchmean"}, ValueError, "reduction must be one of 'none', 'mean', 'sum'"),
    **{
        f"beta {beta}": (
            {**HEADS, "beta": beta},
            ValueError,
            f"beta must be at least 0 and at most 1, but it is {beta}",
        )
        for beta in (-0.1, 1.1, math.nan)
    },
    "beta 0 of the forward KL": ({**HEADS, "beta": 0.0}, ValueError, "beta must be 0.5, .*, but it is 0.0"),
    **{
        f"vocab_size {size}": ({**HEADS, "vocab_size": size}, error, f"vocab_size must be {accepted}, but it is {size}")
        for size, error, accepted in (
            (5, ValueError, "at most the 4 classes of every head"),
            (0, ValueError, "at least 1"),
            (2.0, TypeError, "an int"),
        )
    },
    "vocab_size and a process group": (
        {**HEADS, "vocab_size": 3, "process_group": object()},
        ValueError,
        "vocab_size must be None with process_group, but it is 3",
    ),
    "beta": ({**HEADS, "beta": "x"}, TypeError, "beta must be a number, but it is 'x'"),
    "beta of the reverse KL": (
        {**HEADS, "divergence": "reverse_kl", "beta": 0.1},
        ValueError,
        "beta must be 0.5, the default, with divergence='reverse_kl', but it is 0.1",
    ),
    "ignore_index without labels": ({**HEADS, "ignore_index": 0}, ValueError, "ignore_index must be -100, .*is 0"),
    "temperature": ({**HEADS, "temperature": 0}, ValueError, "temperature must be positive and finite"),
    "chunk_size": ({**HEADS, "chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
    "both": ({**HEADS, "chunk_size": 1, "max_memory": 9}, ValueError, "chunk_size and max_memory must not both be"),
    "no teacher": (NUMBERS, TypeError, "one of teacher_input and teacher_weight, or .* must be given, but none are"),
    "two teachers": ({**HEADS, "teacher_probs": X}, TypeError, "one of teacher_input .* must be given, but 2 are"),
    "half a teacher": (
        {**NUMBERS, "teacher_input": T},
        TypeError,
        "teacher_weight must be a plain tensor, but it is",
    ),
    "no tensor": ({**HEADS, "input": [1.0]}, TypeError, "input must be a plain tensor, but it is of type list"),
    "integers": ({**HEADS, "linear_weight": W.long()}, TypeError, "linear_weight must have a floating-point dtype"),
    "sparse": ({**HEADS, "input": X.to_sparse()}, TypeError, "input must have a floating-point dtype and be strided"),
    "dtypes": (
        {**HEADS, "linear_weight": W.double()},
        TypeError,
        "linear_weight must have dtype torch.float32, as",
    ),
    "teacher's dtypes": (
        {**HEADS, "teacher_weight": H.double()},
        TypeError,
        "teacher_weight must have dtype",
    ),
    "features": (
        {**HEADS, "linear_weight": H},
        ValueError,
        r"linear_weight must have shape \(V, 2\)",
    ),
    "bias": ({**HEADS, "linear_bias": torch.ones(3)}, ValueError, r"linear_bias must have shape \[4\]"),
    "no classes": ({**HEADS, "linear_weight": W[:0]}, ValueError, "linear_weight must have at least one class"),
    "rows": (
        {**HEADS, "teacher_input": T[:2]},
        ValueError,
        r"teacher_input must have the shape of input, \[3\], before its features, but it has shape \[2, 5\]",
    ),
    "classes": ({**HEADS, "teacher_weight": H[:3]}, ValueError, "teacher_weight must have 4 classes, .* it has 3"),
    "teacher's bias": ({**HEADS, "teacher_bias": torch.ones(3)}, ValueError, r"teacher_bias must have shape \[4\]"),
    "probabilities": ({**NUMBERS, "teacher_probs": X}, ValueError, r"teacher_probs must have shape \[3, 4\]"),
    "no pair": ({**NUMBERS, "teacher_top_k": X}, TypeError, "teacher_top_k must be a pair of tensors"),
    "no classes of some": ({**NUMBERS, "teacher_top_k": (X, X)}, TypeError, r"teacher_top_k\[0\] must have dtype"),
    "shapes of some": (
        {**NUMBERS, "teacher_top_k": (TOP[0], X[:, :1])},
        ValueError,
        r"teacher_top_k\[1\] must",
    ),
    "a class outside": (
        {**NUMBERS, "teacher_top_k": (TOP[0] + 3, TOP[1])},
        IndexError,
        r"teacher_top_k\[0\] must have classes from 0 to 3, but it has the row \[3, 4\]",
    ),
    "a class twice": (
        {**NUMBERS, "teacher_top_k": (TOP[0] * 0, TOP[1])},
        ValueError,
        r"teacher_top_k\[0\] must have each class of a row once, but it has the row \[0, 0\]",
    ),
    "target": ({**HEADS, "target": torch.ones(3)}, ValueError, "target must have dtype torch.int64 or torch.uint8"),
    "target's shape": ({**HEADS, "target": torch.ones(2).long()}, ValueError, r"target must have shape \[3\]"),
    "ignore_index": ({**HEADS, "ignore_index": None}, TypeError, "ignore_index must be an int, but it is None"),
    "shift": ({**HEADS, "shift": True}, ValueError, "shift must be 0 without target, but it is True"),
    "too large a shift": (
        {**HEADS, "shift": 4, "target": torch.ones(3).long()},
        ValueError,
        "shift must be at least 0",
    ),
    "token_weight": ({**HEADS, "token_weight": torch.ones(2)}, ValueError, "token_weight must have the shape of class"),
    "zero_if_all_ignored": ({**HEADS, "zero_if_all_ignored": 0}, TypeError, "zero_if_all_ignored must be a bool, but"),
    "sizes alone": ({**HEADS, "vocab_sizes": (4,)}, ValueError, "vocab_sizes must be None if process_group is None"),
    "no group": ({**HEADS, "process_group": "gloo"}, TypeError, "process_group must be None or a torch.distributed"),
}
REFUSALS |= {
    f"{name} requires grad": (
        {**(HEADS | {name: HEADS[name].clone().requires_grad_()})},
        RuntimeError,
        f"{name} must not require grad, because a teacher gets no gradient.* pass {name}.detach()",
    )
    for name in ("teacher_input", "teacher_weight")
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_refused_with_a_sentence(name):
    arguments, error, message = REFUSALS[name]
    with pytest.raises(error, match=f"^linear_kl_div: {message}"):
        F.linear_kl_div(**arguments)


def test_a_tangent_of_the_teacher_is_refused():
    with pytest.raises(RuntimeError, match="teacher_input must not require grad.* it has a tangent"):
        torch.func.jvp(lambda rows: F.linear_kl_div(X, W, rows, H), (T,), (T,))
    with pytest.raises(RuntimeError, match="teacher_input must not require grad"):
        torch.func.grad(lambda rows: F.linear_kl_div(X, W, rows, H))(T)


def test_a_teacher_that_is_trained_is_taken_under_no_grad():
    with torch.no_grad():
        assert F.linear_kl_div(X, W, T, H.clone().requires_grad_()).isfinite()


@every_divergence
def test_the_forward_mode_derivative_where_no_class_is_left(divergence):
    input, weight, _ = student()
    some = some_classes(log_probabilities(*head_of_teacher()), CLASSES)

    def loss(input):
        return F.linear_kl_div(input, weight, teacher_top_k=some, divergence=divergence)

    _, found = torch.func.jvp(loss, (input.detach(),), (torch.ones_like(input),))
    torch.testing.assert_close(found, torch.func.grad(loss)(input.detach()).sum())


INFERENCE_TEACHERS = {
    "head": lambda rows, head, bias: {"teacher_input": rows, "teacher_weight": head, "teacher_bias": bias},
    "log-probabilities": lambda *head: {"teacher_log_probs": log_probabilities(*head)},
    "some classes": lambda *head: {"teacher_top_k": some_classes(log_probabilities(*head), 4)},
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("teacher", INFERENCE_TEACHERS)
def test_a_teacher_made_in_inference_mode_gives_the_gradients_of_a_copy(teacher, reduction):
    with torch.inference_mode():
        given = INFERENCE_TEACHERS[teacher](*(one.clone() for one in head_of_teacher()))
    copies = {
        name: tuple(map(torch.clone, one)) if isinstance(one, tuple) else one.clone() for name, one in given.items()
    }
    input, weight, bias = of_student = student()
    found, expected = (
        torch.autograd.grad(
            F.linear_kl_div(input, weight, linear_bias=bias, reduction=reduction, **one).sum(), of_student
        )
        for one in (given, copies)
    )
    torch.testing.assert_close(found, expected)
