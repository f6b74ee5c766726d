"""linear_cross_entropy: the rows of logits in compiled code, csrc/cpu/linear_cross_entropy_rows.cpp."""

import math
import os
import platform
import subprocess
import sys

from torch_aclnn_ops import _cpu_extension
from torch_aclnn_ops import functional as ours
from torch_aclnn_ops._torch_compat.public import cpu_capability

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests._contract import Maker

# Around the numbers that a register, two and four of them hold.
CLASSES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 1001]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def loaded():
    assert _cpu_extension.why_unavailable() is None


def _softmax(logits, logits_max):
    return torch.ops.torch_aclnn_ops.linear_cross_entropy_softmax(logits, logits_max)


def _gradient(*arguments):
    return torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_gradient(*arguments)


def _statistics(logits, target):
    return torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_statistics(logits, target)


def _logits(rows, classes, margin=5):
    """Make logits whose rows are not dense, in a buffer of sevens, and the buffer."""
    buffer = torch.full((rows, classes + margin), 7.0)
    logits = buffer[:, 3 : 3 + classes]
    return logits.copy_(Maker(torch.float32).normal(rows, classes) * 4), buffer


@pytest.mark.parametrize("classes", CLASSES)
def test_the_softmax_is_exact_to_a_few_roundings(classes):
    logits, buffer = _logits(9, classes)
    logits_max = logits.amax(1)
    shifted = (logits - logits_max.unsqueeze(1)).double()  # in float32, as the operator does
    log_sum_exp = _softmax(logits, logits_max)
    torch.testing.assert_close(logits, shifted.softmax(1).float(), rtol=6 * EPS, atol=0)
    torch.testing.assert_close(log_sum_exp, shifted.logsumexp(1).float(), rtol=4 * EPS, atol=4 * EPS)
    assert buffer[:, :3].eq(7).all() and buffer[:, 3 + classes :].eq(7).all()


def test_the_exponential_is_exact_from_one_to_the_smallest_number_and_then_zero():
    exponents = torch.arange(-110, 1, 1 / 64)
    logits = torch.stack([torch.zeros_like(exponents), exponents], 1)  # each is a row of its own
    _softmax(logits, torch.zeros_like(exponents))
    probabilities, truth = logits.double(), exponents.double().exp()
    found = probabilities[:, 1] / probabilities[:, 0]  # two more roundings
    is_normal = exponents > -86
    assert ((found - truth).abs() <= 2 * EPS * truth)[is_normal].all()
    assert ((found - truth).abs() <= 2**-149)[exponents < -90].all()
    assert found[exponents <= -104].eq(0).all()


@pytest.mark.parametrize("position", [0, 20, 70])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_logits_give_the_same_softmax_as_torch(value, position):
    logits, _ = _logits(3, 71)
    logits[1, position] = value
    truth, logits_max = logits.softmax(1), logits.amax(1)
    factors = torch.ones(3)
    target = torch.full((3,), -1)
    gradient = torch.empty(3, 71, dtype=torch.bfloat16)
    statistics = _gradient(logits.clone(), target, factors, factors, None, gradient)
    torch.testing.assert_close(_statistics(logits, target), statistics, equal_nan=True)
    torch.testing.assert_close(statistics[0], logits_max, equal_nan=True)
    torch.testing.assert_close(gradient, truth.bfloat16(), equal_nan=True)
    _softmax(logits, logits_max)
    torch.testing.assert_close(logits, truth, equal_nan=True)


def test_nan_logits_give_nan_for_any_maximum():
    logits = torch.zeros(2, 40)
    logits[0, 33] = math.nan
    _softmax(logits, torch.zeros(2))
    assert logits[0].isnan().all() and logits[1].eq(1 / 40).all()


def _truth(logits, target, grad_log_sum_exp, grad_predicted, grad_square):
    """Differentiate in float64 what the operator's statistics are a part of."""
    leaf = logits.double().requires_grad_()
    has_target = (target >= 0) & (target < logits.shape[1])
    predicted = leaf.gather(1, target.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1) * has_target
    normalizer = leaf.logsumexp(1)
    loss = grad_log_sum_exp * normalizer + grad_predicted * predicted
    if grad_square is not None:
        loss = loss + grad_square * normalizer.square() / 2
    return torch.autograd.grad(loss.sum(), leaf)[0], (normalizer, predicted, has_target)


@pytest.mark.parametrize("with_square", [False, True])
@pytest.mark.parametrize("where", ["bfloat16", "float32", "in place"])
@pytest.mark.parametrize("classes", CLASSES)
def test_the_gradient_and_the_statistics_are_those_of_the_formula(classes, where, with_square):
    logits, buffer = _logits(9, classes)
    make = Maker(torch.float32)
    grad_log_sum_exp, grad_predicted = make.normal(9), make.normal(9)
    grad_square = make.normal(9) if with_square else None
    target = make.index(classes, 9)
    target[:3] = torch.tensor([-1, -2, classes])  # no class
    truth, (normalizer, predicted, has_target) = _truth(logits, target, grad_log_sum_exp, grad_predicted, grad_square)
    out = logits if where == "in place" else torch.full((9, classes + 4), 5.0, dtype=getattr(torch, where))[:, 1:-3]
    logits_max, before = logits.amax(1), logits.clone()
    alone = _statistics(logits, target)
    assert logits.equal(before)
    statistics = _gradient(logits, target, grad_log_sum_exp, grad_predicted, grad_square, out)
    torch.testing.assert_close(alone, statistics, rtol=2 * EPS, atol=2 * EPS)
    # The factor of the softmax is a sum, and so is the gradient at the target: both may cancel.
    terms = (
        grad_log_sum_exp.abs()
        + grad_predicted.abs()
        + (0 if grad_square is None else grad_square.abs() * normalizer.abs())
    )
    bound = torch.finfo(out.dtype).eps / 2 * truth.abs() + 16 * EPS * terms.unsqueeze(1)
    assert ((out.double() - truth).abs() <= bound).all()
    torch.testing.assert_close(statistics[0], logits_max, rtol=0, atol=0)
    torch.testing.assert_close(statistics[0] + statistics[1], normalizer.float(), rtol=4 * EPS, atol=16 * EPS)
    expected = torch.where(has_target, predicted.float() - logits_max, 0.0)
    torch.testing.assert_close(statistics[2], expected.detach(), rtol=2 * EPS, atol=2 * EPS)
    assert buffer[:, :3].eq(7).all() and buffer[:, 3 + classes :].eq(7).all()
    if where != "in place":
        assert out._base[:, 0].eq(5).all() and out._base[:, -3:].eq(5).all()


def test_an_input_without_rows_is_a_no_op():
    empty = torch.empty(0)
    assert _softmax(torch.empty(0, 4), empty).shape == (0,)
    statistics = _gradient(torch.empty(0, 4), empty.long(), empty, empty, None, torch.empty(0, 4))
    assert [statistic.shape for statistic in (*statistics, *_statistics(torch.empty(0, 4), empty.long()))] == [(0,)] * 6


def test_the_operators_pass_opcheck():
    make = Maker(torch.float32)
    torch.library.opcheck(
        torch.ops.torch_aclnn_ops.linear_cross_entropy_softmax.default, (make.normal(4, 40), make.normal(4))
    )
    torch.library.opcheck(
        torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_statistics.default,
        (make.normal(4, 40), make.index(40, 4)),
    )
    for square in (None, make.normal(4)):
        arguments = (make.normal(4, 40), make.index(40, 4), make.normal(4), make.normal(4), square, torch.empty(4, 40))
        torch.library.opcheck(torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_gradient.default, arguments)


ARGUMENTS = {
    "logits": torch.zeros(3, 4),
    "target": torch.zeros(3, dtype=torch.int64),
    "grad_log_sum_exp": torch.zeros(3),
    "grad_predicted": torch.zeros(3),
    "grad_square": torch.zeros(3),
    "out": torch.zeros(3, 4),
}
WRONG = [
    ("logits", torch.zeros(3, 4, dtype=torch.float64), "logits must have dtype Float.* Double"),
    ("logits", torch.zeros(4, 3).T, "logits must have .* contiguous rows.* strides"),
    ("logits", torch.zeros(3), "logits must have two dimensions"),
    ("logits", torch.zeros(3, 0), "logits must have two dimensions and at least one class"),
    ("target", torch.zeros(3, dtype=torch.int32), "target must have dtype Long.* Int"),
    ("target", torch.zeros(2, dtype=torch.int64), r"target must have .* shape \[3\].* \[2\]"),
    ("grad_log_sum_exp", torch.zeros(4), "grad_log_sum_exp must have"),
    ("grad_predicted", torch.zeros(3).bfloat16(), "grad_predicted must have dtype Float"),
    ("grad_square", torch.zeros(6)[::2], "grad_square must have .* contiguous rows"),
    ("out", torch.zeros(3, 4).half(), "out must have dtype Float or BFloat16.* Half"),
    ("out", torch.zeros(3, 5), r"out must have .* shape \[3, 4\]"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG)
def test_the_gradient_kernel_raises_for_unsupported_inputs(name, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        _gradient(*{**ARGUMENTS, name: value}.values())


WRONG_LOGITS = [(value, sentence) for name, value, sentence in WRONG if name == "logits"]


@pytest.mark.parametrize(("logits", "sentence"), WRONG_LOGITS)
def test_the_softmax_and_statistics_kernels_raise_for_unsupported_logits(logits, sentence):
    rows = len(logits)
    with pytest.raises(ValueError, match=sentence):
        _softmax(logits, torch.zeros(rows))
    with pytest.raises(ValueError, match=sentence):
        torch.ops.torch_aclnn_ops.linear_cross_entropy_logits_statistics(logits, torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(3, 1), torch.zeros(3).double()])
def test_the_softmax_kernel_raises_for_maxima_of_the_wrong_shape(wrong):
    with pytest.raises(ValueError, match="logits_max must have"):
        _softmax(torch.zeros(3, 4), wrong)


GRADIENT, SOFTMAX, STATISTICS = (
    f"linear_cross_entropy_{name}" for name in ("logits_gradient", "softmax", "logits_statistics")
)


@pytest.mark.parametrize(
    ("options", "trained", "alone"),
    [
        ({"chunk_size": 6}, GRADIENT, STATISTICS),
        ({"lse_square_scale": 0.1, "temperature": 2.0}, GRADIENT, STATISTICS),
        ({"softcap": 3.0}, SOFTMAX, SOFTMAX),
        ({"label_smoothing": 0.1}, SOFTMAX, SOFTMAX),
        ({"linear_bias": torch.zeros(50)}, SOFTMAX, SOFTMAX),
        ({"reduction": "none", "outputs": ("entropy",)}, SOFTMAX, SOFTMAX),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_plain_loss_uses_a_single_row_kernel(dtype, options, trained, alone):
    make = Maker(dtype)
    input, head = make.normal(6, 8).requires_grad_(), make.normal(50, 8).requires_grad_()
    options = {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    for name, grad_mode in ((trained, True), (alone, False)):
        with torch.profiler.profile() as profile, torch.set_grad_enabled(grad_mode):
            ours.linear_cross_entropy(input, head, make.index(50, 6), **options)
        called = {event.key.removeprefix("torch_aclnn_ops::") for event in profile.key_averages()}
        assert called & {GRADIENT, SOFTMAX, STATISTICS} == {name}


def _small_loss(input, head, target, ignore_index=-100, mean=True, needs=(True, True)):
    return torch.ops.torch_aclnn_ops.linear_cross_entropy_loss(input, head, target, ignore_index, mean, *needs)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("mean", [True, False])
def test_a_small_loss_and_its_gradients_are_torchs(mean, classes):
    make = Maker(torch.float32)
    input, head, target = make.normal(8, 9).T.requires_grad_(), make.normal(classes, 8), make.index(classes, 18)[::2]
    head.requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in (input, head)]
    reduction = "mean" if mean else "sum"
    truth = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, target, reduction=reduction)
    with torch.no_grad():
        results = _small_loss(input, head, target, mean=mean)
    expected = (truth, *torch.autograd.grad(truth, wide))
    torch.testing.assert_close([result.double() for result in results], list(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_a_small_loss_computes_only_the_needed_gradients(needs):
    make = Maker(torch.float32)
    _, *made = _small_loss(make.normal(3, 4), make.normal(5, 4), make.index(5, 3), needs=needs)
    assert tuple(gradient is not None for gradient in made) == needs


def test_a_trace_of_a_small_loss_is_that_of_other_targets_too():
    input, head = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    traced = make_fx(lambda target: ours.linear_cross_entropy(input, head, target))(torch.arange(4))
    target = torch.tensor([1, -100, 4, 0])
    with torch.no_grad():  # the trace writes to out=
        torch.testing.assert_close(traced(target), ours.linear_cross_entropy(input, head, target))


@pytest.mark.parametrize(("index", "ignore_index"), [(-100, -100), (2, 2), (5, -100), (-1, -100)])
def test_a_small_loss_falls_back_for_ignored_or_invalid_targets(index, ignore_index):
    make = Maker(torch.float32)
    target = torch.tensor([1, index, 0])
    loss, *_ = _small_loss(make.normal(3, 4), make.normal(5, 4), target, ignore_index)
    assert loss.shape == (0,)


@pytest.mark.parametrize(
    ("position", "value", "sentence"),
    [
        (0, torch.zeros(3), "input and weight must have two dimensions"),
        (1, torch.zeros(5), "input and weight must have two dimensions"),
        (2, torch.zeros(2, dtype=torch.int64), r"target must have .* shape \[3\].* \[2\]"),
        (2, torch.zeros(3, dtype=torch.int32), "target must have dtype Long.* Int"),
        (0, torch.zeros(3, 4).double(), "input must have dtype Float.* Double"),
        (1, torch.zeros(5, 4).double(), "weight must have dtype Float.* Double"),
        (1, torch.zeros(5, 3), r"weight must have .* shape \[5, 4\].* \[5, 3\]"),
    ],
)
def test_the_small_loss_kernel_raises_for_unsupported_inputs(position, value, sentence):
    arguments = [torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)]
    arguments[position] = value
    with pytest.raises(ValueError, match=sentence):
        _small_loss(*arguments)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}])
def test_a_small_plain_loss_is_a_single_kernel_call(options):
    make = Maker(torch.float32)
    input, head = make.normal(6, 8).requires_grad_(), make.normal(50, 8).requires_grad_()
    with torch.profiler.profile() as profile:
        ours.linear_cross_entropy(input, head, make.index(50, 6), **options)
    assert "torch_aclnn_ops::linear_cross_entropy_loss" in {event.key for event in profile.key_averages()}


WIDTHS = {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}
if "ATEN_CPU_CAPABILITY" not in os.environ:
    # torch uses whatever the variable says: wider vectors than the chip's are illegal instructions.
    _WIDEST = list(WIDTHS.values()).index(cpu_capability()) if cpu_capability() in WIDTHS.values() else 0
    _NARROWER = [
        pytest.param(width, marks=[pytest.mark.exhaustive] if i < _WIDEST - 1 else [])
        for i, width in enumerate(list(WIDTHS)[:_WIDEST])
    ]

    @pytest.mark.parametrize("width", _NARROWER)
    @pytest.mark.exhaustive
    def test_these_tests_pass_with_the_instruction_sets_of_other_cpus(width):
        # torch reads the variable once.
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": width, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", __file__]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-3000:]


def test_the_instruction_set_is_that_of_torchs_own_kernels():
    capability = cpu_capability()
    expected = capability if capability in WIDTHS.values() else "DEFAULT"
    assert _cpu_extension.vectors() == ("NEON" if platform.machine() == "aarch64" else expected)
