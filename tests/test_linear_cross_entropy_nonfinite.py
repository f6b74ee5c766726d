"""linear_cross_entropy: numbers that are infinite, nan, or near the largest that their dtype has."""

import math

from torch_aclnn_ops import functional as ours

import pytest
import torch
from torch.nn import functional

from tests._contract import Maker

ROWS, FEATURES, CLASSES = 6, 3, 160  # enough classes for CANN's operators
INF, NAN = math.inf, math.nan


def _with_head(value, row=2):
    """Make the feature 0 of a class a number that every row multiplies by one between 1 and 2."""

    def change(input, head, target):
        input[:, 0] = torch.linspace(1, 2, ROWS)
        head[row, 0] = value
        return {}

    return change


def _with_input(value):
    def change(input, head, target):
        input[1, 0] = value
        return {}

    return change


def _with_logits(value):
    """Make one row's logits this infinity, in all classes."""

    def change(input, head, target):
        head[:, 0] = 1
        input[1, 0] = value
        return {}

    return change


def _with_bias(value, classes):
    def change(input, head, target):
        bias = torch.zeros(CLASSES)
        bias[classes] = value
        return {"linear_bias": bias}

    return change


def _with_class_weights(values):
    """Give the classes of the rows these weights, and the others 1."""

    def change(input, head, target):
        weight = torch.ones(CLASSES)
        weight[target[: len(values)]] = torch.tensor(values)
        return {"weight": weight}

    return change


def _with_token_weights(*values):
    return lambda input, head, target: {"token_weight": torch.tensor(values)}


def _with_probability(value):
    def change(input, head, target):
        probabilities = torch.full((ROWS, CLASSES), 1 / CLASSES)
        probabilities[1, 2] = value
        return {"target": probabilities}

    return change


# What happens to a right call whose last row is ignored.
CHANGES = {
    "all logits of a row are -inf": _with_logits(-INF),
    "all logits of a row are inf": _with_logits(INF),
    "one logit is inf": _with_head(INF, 40),
    "one logit is -inf": _with_head(-INF, 40),
    "a target's logit is -inf": _with_head(-INF, 0),
    "one class of the head is nan": _with_head(NAN, 40),
    "a row is nan": _with_input(NAN),
    "a row is inf": _with_input(INF),
    "the bias masks all classes": _with_bias(-INF, slice(None)),
    "the bias masks one class": _with_bias(-INF, 40),
    "the bias masks a target": _with_bias(-INF, 0),
    "one bias is nan": _with_bias(NAN, 40),
    "all counted class weights are 0": _with_class_weights([0.0] * (ROWS - 1)),
    "the counted class weights add up to 0": _with_class_weights([-4.0, 1.0, 1.0, 1.0, 1.0]),
    "a class weight is nan": _with_class_weights([NAN]),
    "token weights add up to 0": _with_token_weights(-4, 1, 1, 1, 1, 5.0),
    "all counted token weights are 0": _with_token_weights(0, 0, 0, 0, 0, 5.0),
    "a token weight is nan": _with_token_weights(NAN, 1, 1, 1, 1, 1),
    "a token weight is inf": _with_token_weights(INF, 1, 1, 1, 1, 1),
    "a probability is nan": _with_probability(NAN),
    "a probability is inf": _with_probability(INF),
}
# Nonfinite values in the head propagate through the product with the zeros of an ignored row on an NPU.
SPREADING = ("one logit is inf", "one logit is -inf", "a target's logit is -inf", "one class of the head is nan")
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "reduction": "none"},
]
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
each_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def torchs(input, head, target, linear_bias=None, token_weight=None, weight=None, reduction="mean", **options):
    """Call ``cross_entropy(linear(...))`` with the rows that are not ignored; ours drops the others."""
    rows = len(input)
    if target.is_floating_point():
        kept = torch.arange(rows)
    else:
        kept = (target != -100).nonzero().squeeze(1)
    logits, target = functional.linear(input[kept], head, linear_bias), target[kept]
    if token_weight is None and reduction != "none":
        return functional.cross_entropy(logits, target, weight, reduction=reduction, **options)
    losses = functional.cross_entropy(logits, target, weight, reduction="none", **options)
    factors = torch.ones(len(kept)) if token_weight is None else token_weight[kept]
    losses = losses * factors
    if reduction == "none":
        return torch.zeros(rows).index_copy(0, kept, losses)
    return losses.sum() if reduction == "sum" else losses.sum() / factors.sum()


def loss_and_gradients(function, tensors, options, device="cpu", dtype=torch.float32):
    """Return the loss and the gradients by input, head and bias."""
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    input, head = (tensor.to(device, dtype).requires_grad_() for tensor in tensors[:2])
    leaves = [input, head]
    if "linear_bias" in options:
        leaves.append(options["linear_bias"].to(dtype).requires_grad_())
        options["linear_bias"] = leaves[-1]
    if "weight" in options:
        options["weight"] = options["weight"].to(dtype)
    loss = function(input, head, options.pop("target", tensors[2].to(device)), **options)
    return [tensor.detach().cpu().float() for tensor in (loss, *torch.autograd.grad(loss.sum(), leaves))]


def tensors_and_options(change, options, dtype=torch.float32):
    make = Maker(dtype)
    tensors = make.normal(ROWS, FEATURES).float(), make.normal(CLASSES, FEATURES).float(), torch.arange(ROWS)
    tensors[2][-1] = -100
    return tensors, {**change(*tensors), **options}


def assert_nan_where_torchs_are(change, options, device="cpu", dtype=torch.float32, **ways):
    """Compare with torch; where torch's result is infinite, anything but a finite number does."""
    tensors, options = tensors_and_options(change, options, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    results = loss_and_gradients(ours.linear_cross_entropy, tensors, {**options, **ways}, device, dtype)
    for result, expected in zip(results, loss_and_gradients(torchs, tensors, options), strict=True):
        finite = expected.isfinite()
        torch.testing.assert_close(result[finite], expected[finite], rtol=tolerance, atol=tolerance, equal_nan=True)
        assert not result[~finite].isfinite().any()
        assert result[expected.isnan()].isnan().all()


@each_option
@each_change
@pytest.mark.parametrize("ways", [{}, {"chunk_size": 2}, {"max_memory": 20_000}], ids=str)
def test_loss_and_gradients_are_nan_where_torchs_are(change, options, ways):
    assert_nan_where_torchs_are(change, options, **ways)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize(
    "name", ["the bias masks all classes", "all counted class weights are 0", "token weights add up to 0"]
)
@pytest.mark.every_nth_case(5)
def test_this_holds_in_compiled_code(name, options):
    compiled = torch.compile(ours.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    tensors, options = tensors_and_options(CHANGES[name], options)
    results = loss_and_gradients(compiled, tensors, options)
    torch.testing.assert_close(results, loss_and_gradients(ours.linear_cross_entropy, tensors, options), equal_nan=True)


def assert_smoothing_survives_large_logits(scale, options, device="cpu"):
    input, head = torch.full((4, 3), 1 / 3), torch.linspace(0.5, 1, 5).unsqueeze(1).expand(5, 3) * scale
    tensors = input, head.contiguous(), torch.tensor([0, 1, 2, 4])
    exact = [tensor.double() for tensor in tensors[:2]]
    truth = functional.cross_entropy(functional.linear(*exact), tensors[2], label_smoothing=0.1, reduction="none")
    loss, *gradients = loss_and_gradients(
        ours.linear_cross_entropy, tensors, {"label_smoothing": 0.1, "reduction": "none", **options}, device
    )
    torch.testing.assert_close(loss, truth.float())
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"weight": torch.ones(5)}], ids=str)
@pytest.mark.parametrize("scale", [1e38, -1e38])
def test_label_smoothing_survives_logits_near_the_largest_number(scale, options):
    assert_smoothing_survives_large_logits(scale, options)


# What float32 cannot hold, divided by a temperature or not.
LARGE_SOFTCAPS = [{"softcap": 1e39}, {"softcap": 1e300}, {"softcap": 3e38, "temperature": 0.5}]


def assert_a_large_softcap_leaves_the_logits(options, reduction, device="cpu"):
    make = Maker(torch.float32)
    tensors = make.normal(ROWS, FEATURES), make.normal(CLASSES, FEATURES), torch.arange(ROWS)
    capped, free = (
        loss_and_gradients(ours.linear_cross_entropy, tensors, {**some, "reduction": reduction}, device)
        for some in (options, {**options, "softcap": None})
    )
    torch.testing.assert_close(capped, free)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", LARGE_SOFTCAPS, ids=str)
def test_a_softcap_above_the_largest_number_is_a_no_op(options, reduction):
    assert_a_large_softcap_leaves_the_logits(options, reduction)
