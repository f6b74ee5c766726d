"""linear_kl_div: the divergence of a student's and a teacher's head, without the logits of all rows."""

import math
import statistics

import torch_aclnn_ops
from torch_aclnn_ops import functional as F
from torch_aclnn_ops import nn

import pytest
import torch

from tests._contract import Case, DropInContract
from tests._linear_kl_div import (
    CLASSES,
    DIVERGENCES,
    REDUCED,
    ROWS,
    TARGET,
    composed,
    draw,
    head_of_teacher,
    log_probabilities,
    loss_of,
    results,
    some_classes,
    student,
    teacher,
)
from tests._modes import LargestOfAll

N, H, W, C = 5, 2, 3, 6
HEAD = ("teacher_input", "teacher_weight", "teacher_bias")


def _call(*names, **options):
    """Return a call whose tensors are a student's head and the named ones."""

    def call(functional, input, weight, bias, *tensors):
        given = dict(zip(names, tensors, strict=True))
        if "classes" in given:
            given["teacher_top_k"] = given.pop("classes"), given.pop("values")
        function = F.linear_kl_div if functional is F else composed
        return function(input, weight, linear_bias=bias, **given, **options)

    return call


def _student(*rows):
    return lambda make: (make.normal(*rows, H), make.normal(C, H), make.normal(C))


def _teacher(*rows):
    return lambda make: (make.normal(*rows, W), make.normal(C, W), make.normal(C))


def _labels(make):
    return *_teacher(N)(make), make.index(C, N).index_fill(0, torch.tensor([1, 3]), -100)


def _with_token_weights(make):
    return *_student(N)(make), make.probability(N)


def _log_probs(make):
    return (make.normal(N, C).log_softmax(-1),)


def _some(number, dtype=torch.int64):
    def make_some(make):
        indices, values = some_classes(*_log_probs(make), number)
        return indices.to(dtype), values

    return make_some


def _cases(divergence, **options):
    def case(name, *names, constants, **more):
        return Case(
            f"{divergence}, {name}", _student(N), _call(*names, divergence=divergence, **options, **more), constants
        )

    some = ("classes", "values")
    return [
        case("mean", *HEAD, temperature=2.0, constants=_teacher(N)),
        case("none", *HEAD, reduction="none", constants=_teacher(N)),
        case("hard labels, none", *HEAD, "target", hard_weight=0.7, reduction="none", chunk_size=2, constants=_labels),
        case("log-probabilities", "teacher_log_probs", chunk_size=2, constants=_log_probs),
        case("probabilities", "teacher_probs", reduction="sum", constants=lambda make: (_log_probs(make)[0].exp(),)),
        case("some classes", *some, temperature=2.0, chunk_size=2, constants=_some(3)),
        case(
            "some classes and hard labels",
            *some,
            "target",
            hard_weight=0.7,
            constants=lambda make: (*_some(3, torch.int32)(make), make.index(C, N)),
        ),
        case("all classes as some", *some, constants=_some(C)),
    ]


def _of_rows(*rows, **options):
    return Case(f"{list(rows)}, {options}", _student(*rows), _call(*HEAD, **options), _teacher(*rows))


def _with_labels(reduction):
    call = _call("token_weight", *HEAD, "target", reduction=reduction)
    return Case(f"token weights and ignored rows, {reduction}", _with_token_weights, call, _labels)


class TestDropIn(DropInContract):
    ROUNDINGS = 4.0
    CASES = [
        *(case for divergence, options in DIVERGENCES.items() for case in _cases(divergence, **options)),
        *map(_with_labels, ("mean", "sum", "none")),
        _of_rows(),
        _of_rows(0, reduction="none"),
        _of_rows(0, 4, reduction="sum"),
        _of_rows(2, 5, divergence="reverse_kl"),
        _of_rows(2, 1, 2, reduction="none"),
        Case(
            "not contiguous",
            lambda make: (make.normal(H, N), make.normal(C, 2 * H), make.normal(2 * C)),
            lambda functional, x, w, b, *given: _call(*HEAD)(
                functional, x.T, w[:, ::2], b[::2], given[0].T, *given[1:]
            ),
            lambda make: (make.normal(W, N), make.normal(C, W), make.normal(C)),
        ),
    ]


CUTS = {"auto": {}, "chunks of 4": {"chunk_size": 4}, "one row": {"chunk_size": 1}, "max_memory": {"max_memory": 6000}}

every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


@every_divergence
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("options", REDUCED)
def test_loss_and_gradients_are_those_of_torchs_composition(divergence, options, temperature, cut):
    found = results(student(), divergence, temperature=temperature, **REDUCED[options], **CUTS[cut])
    expected = results(student(), divergence, function=composed, temperature=temperature, **REDUCED[options])
    torch.testing.assert_close(found, expected)


def _error(found, expected):
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


@every_divergence
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("options", ["mean", "none", "token weights and ignored rows", "hard labels"])
@pytest.mark.every_nth_case(4)
def test_errors_are_those_of_torchs_composition_on_average(divergence, dtype, options):
    ours, torchs = [], []
    for seed in range(0, 4800, 100):
        of_student, of_teacher = student(dtype, first_seed=seed), head_of_teacher(dtype, first_seed=seed + 10)
        wide = [one.detach().double().requires_grad_() for one in of_student]
        given = teacher(head=[one.double() for one in of_teacher])
        expected = results(wide, divergence, given, function=composed, **REDUCED[options])
        given = teacher(head=of_teacher)
        for function, errors in ((F.linear_kl_div, ours), (composed, torchs)):
            found = results(of_student, divergence, given, function=function, chunk_size=4, **REDUCED[options])
            errors.append([_error(*pair) for pair in zip(found, expected, strict=True)])
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
    assert (found - expected).abs().max() <= 2**-8 * expected.abs().max()


@every_divergence
@pytest.mark.parametrize("gap", [20.0, 100.0])
def test_other_classes_that_the_student_finds_very_unlikely_have_gradients(divergence, gap):
    def of_dtype(dtype):
        input, weight, bias = (one.detach().to(dtype).requires_grad_() for one in student())
        some = some_classes(log_probabilities(*head_of_teacher()), 4)
        # An offset of the bias shared by all top-k classes of one row.
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


def test_a_uint8_label_is_not_that_of_ignored_rows():
    target = torch.full((ROWS,), 156, dtype=torch.uint8)  # -100 in 8 bits
    found = loss_of(student(), target=target, reduction="none")
    torch.testing.assert_close(found, loss_of(student(), reduction="none"))


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


@pytest.mark.parametrize("rows", [ROWS, 0], ids=["ignored", "none"])
def test_a_mean_over_no_rows_is_nan_or_0_as_the_caller_wants_and_its_gradients_are_0(rows):
    nothing = {"target": torch.full((rows,), 7), "ignore_index": 7, "given": teacher(rows=(rows,))}
    for is_zero in (False, True):
        loss, *found = results(student(rows=(rows,)), **nothing, zero_if_all_ignored=is_zero)
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


def test_autocast_rounds_both_heads_and_leaves_results_in_float32():
    # Thirds, which bfloat16 cannot represent.
    heads = [[one.detach() / 3 for one in head] for head in (student(torch.float32), head_of_teacher(torch.float32))]

    def results_of(of_student, of_teacher):
        return results([one.requires_grad_() for one in of_student], "reverse_kl", teacher(head=of_teacher))

    expected = results_of(*([one.bfloat16() for one in head] for head in heads))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(results_of(*heads), [one.float() for one in expected])


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
    torch.testing.assert_close(found, results(student(), divergence, function=composed))


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
        message = f"^linear_kl_div: target must have labels from 0 to 23, .* it has {label}$"
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
