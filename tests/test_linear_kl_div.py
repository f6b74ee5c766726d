"""linear_kl_div: the divergence of a student's and a teacher's head, without the logits of all rows."""

import math
import statistics

import torch_aclnn_ops
from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from tests._linear_kl_div import (
    CLASSES,
    DIVERGENCES,
    REDUCED,
    ROWS,
    TARGET,
    TEACHERS,
    composed,
    divergence_of,
    draw,
    gradients,
    head_of_teacher,
    log_probabilities,
    loss_of,
    results,
    some_classes,
    student,
    teacher,
    truth,
)
from tests._modes import LargestOfAll

HALF_DTYPES = (torch.bfloat16, torch.float16)
CUTS = {"auto": {}, "chunks of 4": {"chunk_size": 4}, "one row": {"chunk_size": 1}, "max_memory": {"max_memory": 6000}}
ALL_CLASSES = [kind for kind in TEACHERS if kind not in ("head", "some classes")]

every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


def _error(found, expected):
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


@every_divergence
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("options", REDUCED)
def test_loss_and_gradients_are_those_of_torchs_composition(divergence, options, temperature, cut):
    found = results(student(), divergence, temperature=temperature, **REDUCED[options], **CUTS[cut])
    expected = truth(student(), head_of_teacher(), divergence, temperature=temperature, **REDUCED[options])
    torch.testing.assert_close(found, expected)


@every_divergence
@pytest.mark.parametrize("dtype", (torch.float32, *HALF_DTYPES), ids=str)
@pytest.mark.parametrize("options", ["mean", "none", "token weights and ignored rows", "hard labels"])
@pytest.mark.every_nth_case(4)
def test_errors_are_those_of_torchs_composition_on_average(divergence, dtype, options):
    ours, torchs = [], []
    for seed in range(0, 4800, 100):
        of_student, of_teacher = student(dtype, first_seed=seed), head_of_teacher(dtype, first_seed=seed + 10)
        expected = truth(of_student, of_teacher, divergence, **REDUCED[options])
        found = results(of_student, divergence, teacher(head=of_teacher), chunk_size=4, **REDUCED[options])
        assert found[0].dtype == torch.float32 and [one.dtype for one in found[1:]] == [dtype] * 3
        theirs = composed(of_student, of_teacher, divergence, **REDUCED[options])
        ours.append([_error(*pair) for pair in zip(found, expected, strict=True)])
        torchs.append([_error(*pair) for pair in zip(theirs, expected, strict=True)])
    for mine, theirs in zip(zip(*ours, strict=True), zip(*torchs, strict=True), strict=True):
        rounding = torch.finfo(dtype).eps / 2  # of the result
        assert statistics.mean(mine) <= 1.25 * statistics.mean(theirs) + rounding


@every_divergence
def test_the_sums_of_many_16_bit_rows_are_rounded_once(divergence):
    input, weight = draw(400, 8, seed=1, dtype=torch.bfloat16), draw(30, 8, seed=2, dtype=torch.bfloat16)
    weight.requires_grad_()
    options = {"teacher_log_probs": draw(400, 30, seed=3).log_softmax(1), "divergence": divergence, "reduction": "sum"}
    (found,) = torch.autograd.grad(F.linear_kl_div(input, weight, chunk_size=8, **options), weight)
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear_kl_div(input.double(), wide, **options), wide)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-4)
    assert _error(found, expected) <= 2**-8


@every_divergence
@pytest.mark.parametrize("options", ["mean", "ignored rows, none", "hard labels"])
@pytest.mark.parametrize("kind", ALL_CLASSES)
def test_a_teachers_numbers_stand_for_its_head(kind, options, divergence):
    options = {"temperature": 2.0, "chunk_size": 4, **REDUCED[options]}
    found = results(student(), divergence, teacher(kind, temperature=2.0), **options)
    torch.testing.assert_close(found, results(student(), divergence, **options))


@every_divergence
@pytest.mark.parametrize("options", [{}, REDUCED["hard labels of all rows"]], ids=["alone", "hard labels"])
def test_some_classes_are_compared_with_all_others_as_one(divergence, options):
    of_student, of_teacher = student(), log_probabilities(*head_of_teacher())
    indices, values = some_classes(of_teacher, 4)
    rest = torch.zeros(ROWS, CLASSES, dtype=torch.bool).scatter(1, indices, True)

    def grouped(log_probs):
        return torch.cat([log_probs.gather(1, indices), log_probs.masked_fill(rest, -math.inf).logsumexp(1, True)], 1)

    expected = divergence_of(
        grouped(log_probabilities(*of_student)), grouped(of_teacher), divergence, **DIVERGENCES[divergence]
    ).mean()
    if options:
        expected = expected + options["hard_weight"] * cross_entropy(linear(*of_student), options["target"])
    found = loss_of(of_student, divergence, {"teacher_top_k": (indices.int(), values)}, chunk_size=3, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, of_student), gradients(expected, of_student))


@every_divergence
@pytest.mark.parametrize("gap", [20.0, 100.0])
def test_other_classes_that_the_student_finds_very_unlikely_have_gradients(divergence, gap):
    def of_dtype(dtype):
        input, weight, bias = (one.detach().to(dtype).requires_grad_() for one in student())
        some = some_classes(log_probabilities(*head_of_teacher()), 4)
        # An offset of the bias that all top-k classes of a row share, as one row has.
        indices, values = some[0][:1], some[1][:1].to(dtype)
        shifted = bias.index_add(0, indices[0], torch.full((4,), gap, dtype=dtype))
        loss = loss_of((input[:1], weight, shifted), divergence, {"teacher_top_k": (indices, values)})
        return torch.autograd.grad(loss, (input, weight, bias))

    for found, expected in zip(of_dtype(torch.float32), of_dtype(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_the_forward_kl_of_some_renormalized_classes_leaves_the_others_out():
    of_student = student()
    indices, values = some_classes(log_probabilities(*head_of_teacher()), 4)
    values = values - values.logsumexp(1, keepdim=True)
    at_classes = log_probabilities(*of_student).gather(1, indices)
    expected = (values.exp() * (values - at_classes)).sum(1).mean()
    found = loss_of(of_student, given={"teacher_top_k": (indices, values)})
    torch.testing.assert_close(found, expected)


SHAPES = {"one row": (), "no rows": (0,), "a batch": (2, 5), "an empty batch": (0, 4), "three dimensions": (2, 3, 2)}


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_may_have_any_number_of_dimensions(shape, reduction):
    of_student, of_teacher = student(rows=SHAPES[shape]), head_of_teacher(rows=SHAPES[shape])
    found = results(of_student, "reverse_kl", teacher(head=of_teacher), reduction=reduction)
    expected = truth(of_student, of_teacher, "reverse_kl", reduction=reduction)
    assert found[0].shape == expected[0].shape
    if 0 in SHAPES[shape] and reduction == "mean":
        assert found[0].isnan() and not any(one.any() for one in found[1:])
    else:
        torch.testing.assert_close(found, expected)


def test_arguments_need_not_be_contiguous():
    rows, head, bias = head_of_teacher()
    strided = [torch.stack([one.detach(), one.detach()], -1)[..., 0].requires_grad_() for one in student()]
    transposed = teacher(head=[rows.T.contiguous().T, head.T.contiguous().T, bias])
    torch.testing.assert_close(results(strided, "reverse_kl", transposed), results(student(), "reverse_kl"))


def test_a_uint8_label_is_not_that_of_ignored_rows():
    target = torch.full((ROWS,), 156, dtype=torch.uint8)  # -100 in 8 bits
    found = loss_of(student(), target=target, reduction="none")
    torch.testing.assert_close(found, loss_of(student(), reduction="none"))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_of_each_row_may_be_changed_in_place(compiled):
    given = teacher()

    def tripled(*of_student):
        return loss_of(of_student, given=given, reduction="none").mul_(3)

    call = torch.compile(tripled, fullgraph=True, backend="aot_eager") if compiled else tripled
    one, other = student(), student()
    expected = gradients(loss_of(other, given=given, reduction="none") * 3, other)
    torch.testing.assert_close(gradients(call(*one), one), expected)


@pytest.mark.parametrize("hard_weight", [0.0, 0.7])
def test_labels_may_stand_behind_their_rows(hard_weight):
    (input, *head), (rows, *its_head) = student(rows=(2, 5)), head_of_teacher(rows=(2, 5))
    target = torch.tensor([[7, 3, -100, 4, 5], [-100, 1, 2, 3, -100]])
    token_weight, options = draw(2, 5, seed=3).abs(), {"reduction": "none", "hard_weight": hard_weight}
    behind = {"target": target, "token_weight": token_weight, "shift": True}
    found = loss_of((input, *head), given=teacher(head=(rows, *its_head)), **behind, **options)
    beside = {"target": target[:, 1:], "token_weight": token_weight[:, 1:]}
    expected = loss_of((input[:, :-1], *head), given=teacher(head=(rows[:, :-1], *its_head)), **beside, **options)
    torch.testing.assert_close(found[:, 1:], expected)
    assert not found[:, 0].any()


def test_a_mean_over_no_rows_is_nan_or_0_as_the_caller_wants_and_its_gradients_are_0():
    nothing = {"target": torch.full((ROWS,), 7), "ignore_index": 7}
    for is_zero in (False, True):
        loss, *found = results(student(), **nothing, zero_if_all_ignored=is_zero)
        assert loss == 0 if is_zero else loss.isnan()
        assert not any(one.any() for one in found)


def test_what_is_not_finite_in_an_ignored_row_stays_there():
    of_student, of_teacher = student(), head_of_teacher()
    expected = results(of_student, "jensen_shannon", target=TARGET)
    with torch.no_grad():
        of_student[0][3], of_teacher[0][3] = math.nan, math.inf
    found = results(of_student, "jensen_shannon", teacher(head=of_teacher), target=TARGET)
    torch.testing.assert_close(found, expected)


@every_divergence
@pytest.mark.parametrize("order", ["first", "second"])
def test_classes_that_both_mask_have_no_part(divergence, order):
    of_student, of_teacher = student(), head_of_teacher()
    few, fewer = ([one[:-3] if len(one) == CLASSES else one for one in head] for head in (of_student, of_teacher))
    with torch.no_grad():
        of_student[2][-3:], of_teacher[2][-3:] = -math.inf, -math.inf
    loss = loss_of(of_student, divergence, teacher(head=of_teacher))
    expected = loss_of(few, divergence, teacher(head=fewer))
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
    assert loss_of(of_student, "forward_kl") == math.inf
    assert loss_of(of_student, "reverse_kl").isfinite()


def test_the_teacher_may_have_another_dtype():
    of_student, of_teacher = student(torch.float32), head_of_teacher(torch.bfloat16)
    expected = results(of_student, given=teacher(head=[one.float() for one in of_teacher]))
    torch.testing.assert_close(results(of_student, given=teacher(head=of_teacher)), expected)


def test_autocast_multiplies_in_16_bits_and_leaves_the_loss_in_float32():
    of_student = student(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(of_student, "reverse_kl", teacher(dtype=torch.float32))
    found = torch.autograd.grad(loss, of_student)
    rounded = [one.detach().bfloat16().requires_grad_() for one in of_student]
    expected = loss_of(rounded, "reverse_kl", teacher(dtype=torch.bfloat16))
    torch.testing.assert_close(loss, expected)
    assert loss.dtype == torch.float32 and {one.dtype for one in found} == {torch.float32}
    torch.testing.assert_close(found, tuple(one.float() for one in torch.autograd.grad(expected, rounded)))


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
        with LargestOfAll() as mode:
            loss = F.linear_kl_div(input, weight, input, weight.detach(), reduction=reduction, max_memory=100_000)
            loss.sum().backward()
        assert mode.elements < rows * classes / 4


@pytest.mark.parametrize(("beta", "divergence"), [(0, "forward_kl"), (1.0, "reverse_kl")])
def test_a_jensen_shannon_divergence_of_one_distribution_is_the_kl_as_in_trl(beta, divergence):
    found = results(student(), "jensen_shannon", beta=beta)
    torch.testing.assert_close(found, truth(student(), head_of_teacher(), divergence))


@every_divergence
@pytest.mark.parametrize("kind", ["head", "log-probabilities", "some classes"])
def test_padded_classes_of_both_heads_do_not_count(divergence, kind):
    long = dict(given := teacher(kind))
    for name, dim in {"teacher_weight": 0, "teacher_bias": 0, "teacher_log_probs": 1}.items():
        if name in given:
            long[name] = torch.cat([given[name], given[name].narrow(dim, 0, 2) + 3], dim)
    input, *head = student()
    wide = [input, *(torch.cat([one, one[:5]]).detach().requires_grad_() for one in head)]
    expected = results(student(), divergence, given)
    loss, *found = results(wide, divergence, long, vocab_size=CLASSES)
    within = [one[: len(wanted)] for one, wanted in zip(found, expected[1:], strict=True)]
    torch.testing.assert_close([loss, *within], expected)
    assert not found[1][CLASSES:].any() and not found[2][CLASSES:].any()


def test_explain_says_that_no_operator_of_cann_serves_it():
    said = torch_aclnn_ops.explain(loss_of, student())
    assert said.startswith("linear_kl_div: PyTorch fallback, because the tensors are on cpu; gradients with the")


def test_the_module_keeps_the_options_of_the_function():
    (input, weight, _), (rows, head, _) = student(), head_of_teacher()
    options = {"divergence": "jensen_shannon", "beta": 0.25, "temperature": 2.0, "reduction": "sum", "chunk_size": 4}
    options |= {"hard_weight": 0.7}
    module = nn.LinearKLDivLoss(**options)
    found = module(input, weight, rows, head, target=TARGET)
    assert torch.equal(found, F.linear_kl_div(input, weight, rows, head, target=TARGET, **options))
    assert "jensen_shannon" in repr(module) and "max_memory" not in repr(module)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["head", "log-probabilities", "some classes"])
def test_a_teacher_made_in_inference_mode_gives_the_gradients_of_a_copy(kind, reduction):
    with torch.inference_mode():
        given = teacher(kind, [one.clone() for one in head_of_teacher()])
    copies = torch.utils._pytree.tree_map(torch.clone, given)
    found, expected = (results(student(), given=one, reduction=reduction)[1:] for one in (given, copies))
    torch.testing.assert_close(found, expected)
