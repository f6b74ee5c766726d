"""linear_cross_entropy: features that torch's function lacks, against the same losses computed from all logits."""

import math

from torch_aclnn_ops import functional as ours
from torch_aclnn_ops.functional import LinearCrossEntropyOutput
from torch_aclnn_ops.functional.linear_cross_entropy import implementations

import pytest
import torch
from torch.nn import functional

from tests._contract import Case, DropInContract, Maker

N, H, C = 5, 2, 6


def _naive(input, head, target, *, shift=0, token_weight=None, **options):
    """Compute our loss from all logits; a shift drops the last rows and the first labels."""
    if not shift:
        return _of_rows(input, head, target, token_weight=token_weight, **options)
    factors = None if token_weight is None else token_weight[..., shift:]
    result = _of_rows(input[..., :-shift, :], head, target[..., shift:], token_weight=factors, **options)
    results = [result] if isinstance(result, torch.Tensor) else result
    results = [each if each is None or each.dim() == 0 else functional.pad(each, (shift, 0)) for each in results]
    return LinearCrossEntropyOutput(*results) if "outputs" in options else results[0]


def _of_rows(
    input,
    head,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    label_smoothing=0.0,
    softcap=None,
    lse_square_scale=0.0,
    temperature=1.0,
    token_weight=None,
    outputs=(),
):
    logits = functional.linear(input, head, linear_bias)
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    weight = None if weight is None else weight.to(logits.dtype)
    flat_logits = logits.reshape(-1, logits.shape[-1])
    distribution = target.is_floating_point()
    flat_target = target.reshape(-1, target.shape[-1]).to(logits.dtype) if distribution else target.reshape(-1)
    counted = torch.ones(len(flat_logits)) if distribution else (flat_target != -100)
    factor = counted.to(logits.dtype)
    if token_weight is not None:
        factor = factor * token_weight.reshape(-1).to(logits.dtype)
    losses = factor * functional.cross_entropy(
        flat_logits, flat_target, weight=weight, reduction="none", label_smoothing=label_smoothing
    )
    z_losses = factor * lse_square_scale * flat_logits.logsumexp(1).square()
    total = factor if weight is None or distribution else factor * weight[flat_target.clamp(min=0)]
    shape = input.shape[:-1]
    if reduction == "none":
        loss, z_loss = (losses + z_losses).reshape(shape), z_losses.reshape(shape)
    else:
        count, z_count = (total.sum(), factor.sum()) if reduction == "mean" else (1, 1)
        z_loss = z_losses.sum() / z_count
        loss = losses.sum() / count + z_loss
    if not outputs:
        return loss
    log_probabilities = flat_logits.log_softmax(1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(1) * counted
    chosen = -functional.cross_entropy(flat_logits, flat_target, reduction="none") if not distribution else None
    return LinearCrossEntropyOutput(
        loss,
        None if chosen is None else chosen.reshape(shape),
        entropy.reshape(shape),
        z_loss,
        logsumexp=(flat_logits.logsumexp(1) * counted).reshape(shape),
    )


def _function(F):
    return ours.linear_cross_entropy if F is ours else _naive


def _call(*names, **options):
    """Return a call whose tensors are input, head, the named ones, and the target."""

    def call(F, input, head, *others):
        *named, target = others
        return _function(F)(input, head, target, **dict(zip(names, named, strict=True)), **options)

    return call


def _joined(*names, **options):
    """Return a call that sums several outputs with different factors."""

    def call(F, input, head, target):
        result = _function(F)(input, head, target, outputs=names, **options)
        total = result.loss.sum()
        for place, name in enumerate(names):
            value = getattr(result, name)
            factors = torch.linspace(0.5, 1.5 + place, value.numel(), dtype=value.dtype, device=value.device)
            total = total + (value * factors.reshape(value.shape)).sum()
        return total

    return call


def _input_and_head(make):
    return make.normal(N, H), make.normal(C, H)


def _with_bias(make):
    return *_input_and_head(make), make.normal(C)


def _with_token_weights(make):
    return *_input_and_head(make), make.probability(N)


def _batches(make):
    return make.normal(2, 4, H), make.normal(C, H)


def _labels(make):
    return (make.index(C, 2, 4),)


def _some_ignored(make):
    return (make.index(C, N).index_fill(0, torch.tensor([1, 3]), -100),)


def _probabilities(make):
    return *_input_and_head(make), make.normal(N, C).softmax(1)


def _case(name, call, inputs=_input_and_head, constants=_some_ignored):
    return Case(name, inputs, call, constants)


EVERYTHING = {"label_smoothing": 0.2, "softcap": 1.5, "temperature": 0.8, "lse_square_scale": 0.05}
SMOOTHED = {"lse_square_scale": 0.1, "label_smoothing": 0.1}
FEATURE_CASES = [
    _case("softcap", _call(softcap=0.7)),
    _case("softcap, none", _call(softcap=2.0, reduction="none")),
    _case("temperature and bias, none", _call("linear_bias", temperature=3.0, reduction="none"), _with_bias),
    _case("z-loss", _call(lse_square_scale=0.1)),
    _case("z-loss, none", _call(lse_square_scale=0.1, reduction="none")),
    _case(
        "everything",
        _call("linear_bias", "weight", **EVERYTHING),
        _with_bias,
        lambda make: (make.probability(C), *_some_ignored(make)),
    ),
    _case("token weights, mean", _call("token_weight"), _with_token_weights),
    _case(
        "token weights with z-loss and smoothing, none",
        _call("token_weight", reduction="none", **SMOOTHED),
        _with_token_weights,
    ),
    _case(
        "token weights without derivatives",
        _call("token_weight", reduction="sum"),
        constants=lambda make: (make.probability(N), *_some_ignored(make)),
    ),
    Case("probabilities with softcap", _probabilities, _call(softcap=1.1)),
    Case("probabilities with z-loss and smoothing", _probabilities, _call(**SMOOTHED)),
    Case("batch and time, none", _batches, _call(reduction="none"), _labels),
    Case("shift", _batches, _call(shift=True), lambda m: (m.index(C, 2, 4).index_fill(1, torch.tensor([2]), -100),)),
    _case("shift by two of one sequence, none", _call(shift=2, reduction="none")),
    Case(
        "shift with token weights and smoothing",
        lambda make: (*_batches(make), make.probability(2, 4)),
        _call("token_weight", shift=1, **SMOOTHED),
        _labels,
    ),
    Case(
        "batch and time with probabilities",
        lambda make: (make.normal(2, 3, H), make.normal(C, H), make.normal(2, 3, C).softmax(2)),
        _call(reduction="none"),
    ),
]

ALL = {"temperature": 0.6, "lse_square_scale": 0.1, "reduction": "none"}
OUTPUT_CASES = [
    _case("log-probabilities", _joined("log_probabilities")),
    _case("entropy", _joined("entropy")),
    _case("z-loss", _joined("z_loss", lse_square_scale=0.1)),
    _case("log-sum-exp", _joined("logsumexp")),
    _case("log-sum-exp, softcap, sum", _joined("logsumexp", softcap=2.0, reduction="sum")),
    _case(
        "log-probabilities and log-sum-exp, shifted, none",
        _joined("log_probabilities", "logsumexp", shift=1, reduction="none"),
    ),
    _case("all of them with a temperature, none", _joined("log_probabilities", "entropy", "z_loss", **ALL)),
]


class TestFeatures(DropInContract):
    CASES = FEATURE_CASES
    ROUNDINGS = 4.0

    @pytest.mark.exhaustive  # each path has a row in test_linear_cross_entropy.py
    def test_a_transform_inside_a_compiled_function_equals_one_outside(self, case):
        super().test_a_transform_inside_a_compiled_function_equals_one_outside(case)


class TestOutputs(DropInContract):
    CASES = OUTPUT_CASES
    ROUNDINGS = 8.0  # a call sums several results, each rounded separately

    @pytest.mark.exhaustive  # as for features
    def test_a_transform_inside_a_compiled_function_equals_one_outside(self, case):
        super().test_a_transform_inside_a_compiled_function_equals_one_outside(case)


def _small_call(**options):
    make = Maker(torch.float32)
    input, head = (tensor.requires_grad_() for tensor in _input_and_head(make))
    (target,) = _some_ignored(make)
    return ours.linear_cross_entropy(input, head, target, **options), (input, head, target)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_predicted_tokens_and_accuracy_are_those_of_the_logits(reduction):
    result, (input, head, target) = _small_call(outputs=("predicted_tokens", "token_accuracy"), reduction=reduction)
    predicted = (input @ head.T).argmax(1)
    counted = target != -100
    assert torch.equal(result.predicted_tokens, predicted.where(counted, -1))
    right = ((predicted == target) & counted).float()
    expected = {"none": right, "sum": right.sum(), "mean": right.sum() / counted.sum()}[reduction]
    torch.testing.assert_close(result.token_accuracy, expected)


def test_only_requested_outputs_are_returned():
    loss, _ = _small_call()
    assert isinstance(loss, torch.Tensor)
    result, _ = _small_call(outputs=("entropy",))
    assert [name for name, value in result._asdict().items() if value is not None] == ["loss", "entropy"]
    torch.testing.assert_close(result.loss, loss)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_do_not_depend_on_predicted_tokens_which_may_be_changed_in_place(reduction):
    result, (input, head, _) = _small_call(outputs=("predicted_tokens",), reduction=reduction)
    result.predicted_tokens.zero_()
    expected, arguments = _small_call(reduction=reduction)
    found = torch.autograd.grad(result.loss.sum(), (input, head))
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), arguments[:2]))


@pytest.mark.parametrize("options", [{}, {"lse_square_scale": 0.1}, {"label_smoothing": 0.1}, {"softcap": 3}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_mean_over_no_rows_is_nan_or_optionally_0_with_zero_gradients(options, reduction):
    target = torch.full((3,), -100)
    for zero in (False, True):
        input, head = torch.randn(3, H, requires_grad=True), torch.randn(C, H, requires_grad=True)
        given = {"zero_if_all_ignored": zero, "reduction": reduction, **options}
        loss = ours.linear_cross_entropy(input, head, target, **given)
        assert loss.requires_grad
        assert bool(loss.isnan().all()) == (reduction == "mean" and not zero)
        loss.sum().backward()
        assert not input.grad.any() and not head.grad.any()
        with torch.no_grad():  # uses another path, without gradients in the forward pass
            again = ours.linear_cross_entropy(input, head, target, **given)
        torch.testing.assert_close(again, loss.detach(), equal_nan=True)


@pytest.mark.parametrize("kept, zero, accuracy", [(0, True, 0.0), (0, False, math.nan), (1, False, 1.0)])
def test_the_accuracy_of_no_rows_is_nan_or_0_like_the_loss(kept, zero, accuracy):
    target = torch.tensor([2, 2, 2]).where(torch.arange(3) < kept, -100)
    head = torch.zeros(C, H).index_fill(0, torch.tensor(2), 1)
    options = {"zero_if_all_ignored": zero, "outputs": ("token_accuracy",)}
    result = ours.linear_cross_entropy(torch.ones(3, H), head, target, **options)
    torch.testing.assert_close(result.token_accuracy, torch.tensor(accuracy), equal_nan=True)


def test_ignored_rows_that_are_not_finite_leave_the_gradients_finite():
    (_, (input, head, target)) = _small_call()
    with torch.no_grad():
        input[target == -100] = torch.tensor([math.inf, math.nan])
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"chunk_size": 2}):
        loss = ours.linear_cross_entropy(input, head, target, **options)
        assert loss.isfinite().all()
        gradients = torch.autograd.grad(loss.sum(), (input, head), create_graph=True)
        seconds = torch.autograd.grad(sum(one.square().sum() for one in gradients), (input, head))
        assert all(one.isfinite().all() for one in (*gradients, *seconds))


def test_a_small_loss_of_a_confident_prediction_does_not_underflow():
    # log sum exp(z) - z[target] would round to 0: both are 100.
    head = torch.tensor([[100.0], [85.0]])
    loss = ours.linear_cross_entropy(torch.ones(1, 1), head, torch.tensor([0]))
    torch.testing.assert_close(loss.item(), math.log1p(math.exp(-15)), rtol=0.3, atol=0)


def test_a_class_masked_by_its_bias_does_not_contribute_to_the_entropy():
    bias = torch.tensor([0.0, 0.0, -math.inf])
    input, head = torch.zeros(1, 2, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
    result = ours.linear_cross_entropy(input, head, torch.tensor([0]), linear_bias=bias, outputs=("entropy",))
    torch.testing.assert_close(result.entropy.item(), math.log(2))
    for gradient in torch.autograd.grad(result.entropy.sum() + result.loss, (input, head)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_shift_of_the_whole_sequence_leaves_no_label(reduction, length):
    input, head, target = torch.rand(2, length, H, requires_grad=True), torch.rand(C, H), torch.zeros(2, length).long()
    loss = ours.linear_cross_entropy(input, head, target, shift=True, reduction=reduction)
    expected = {"sum": torch.zeros(()), "mean": torch.tensor(math.nan), "none": torch.zeros(2, length)}[reduction]
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert torch.autograd.grad(loss.sum(), input)[0].count_nonzero() == 0


def test_megatrons_label_smoothing_is_spread_over_the_other_classes():
    input, head, target = torch.rand(N, H).double(), torch.rand(C, H).double(), torch.arange(N)
    found = ours.linear_cross_entropy(input, head, target, label_smoothing=0.1 * C / (C - 1), reduction="none")
    probabilities = torch.full((N, C), 0.1 / (C - 1)).double().scatter(1, target[:, None], 0.9)
    torch.testing.assert_close(found, functional.cross_entropy(input @ head.T, probabilities, reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_shift_takes_token_weights_of_either_16_bit_dtype_under_autocast(dtype):
    make = Maker(torch.float32)
    arguments = make.normal(2, 4, H), make.normal(C, H), make.index(C, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = ours.linear_cross_entropy(*arguments, shift=True)
        loss = ours.linear_cross_entropy(*arguments, shift=True, token_weight=torch.ones(2, 4, dtype=dtype))
    torch.testing.assert_close(loss, expected)


def test_a_shift_copies_no_rows(monkeypatch):
    given = []
    rows_of = implementations.rows_of
    monkeypatch.setattr(implementations, "rows_of", lambda call, *args: given.append(call) or rows_of(call, *args))
    input = torch.rand(2, 4, H)
    ours.linear_cross_entropy(input, torch.rand(C, H), torch.ones(2, 4).long(), shift=True, chunk_size=8)
    assert given[0].input.data_ptr() == input.data_ptr() and given[0].input.shape == (8, H)


def test_shifted_outputs_align_with_their_labels():
    input, head, target = torch.rand(2, 4, H), torch.rand(C, H), torch.tensor([[0, 1, 2, 3], [4, 5, -100, 1]])
    outputs = ("predicted_tokens", "token_accuracy", "log_probabilities")
    result = ours.linear_cross_entropy(input, head, target, shift=True, reduction="none", outputs=outputs)
    predicted = functional.pad((input @ head.T).argmax(-1)[:, :-1], (1, 0), value=-1).masked_fill(target == -100, -1)
    assert torch.equal(result.predicted_tokens, predicted)
    assert torch.equal(result.token_accuracy, (predicted == target).float())
    assert not result.loss[:, 0].any() and result.loss[1, 1] == -result.log_probabilities[1, 1]
