"""linear_cross_entropy: numbers that are infinite, nan, or close to the largest of their dtype."""

import math
from functools import partial

from torch_aclnn_ops import functional as ours

import pytest
import torch
from torch.nn import functional

from tests._contract import Maker

ROWS, FEATURES, CLASSES = 6, 3, 160  # enough classes for CANN's operators
INF, NAN = math.inf, math.nan
ALL_0 = slice(None), 0


def _filled(tensor, *places):
    """Return a copy with other numbers at some positions."""
    tensor = tensor.clone()
    for place, value in places:
        tensor[place] = value
    return tensor


def _head(value, row):
    """Set feature 0 of a class to a number that every row multiplies by a factor between 1 and 2."""
    rows = torch.linspace(1, 2, ROWS)
    return lambda input, head: {"input": _filled(input, (ALL_0, rows)), "head": _filled(head, ((row, 0), value))}


def _logits(value):
    """Set all logits of one row to this infinity."""
    return lambda input, head: {"input": _filled(input, ((1, 0), value)), "head": _filled(head, (ALL_0, 1))}


def _input(value):
    return lambda input, head: {"input": _filled(input, ((1, 0), value))}


def _option(name, tensor, *places):
    return lambda input, head: {name: _filled(tensor, *places)}


_bias = partial(_option, "linear_bias", torch.zeros(CLASSES))
_weight = partial(_option, "weight", torch.ones(CLASSES))
_probability = partial(_option, "target", torch.full((ROWS, CLASSES), 1 / CLASSES))
_tokens = partial(_option, "token_weight")
_COUNTED = slice(ROWS - 1)  # the rows that are not ignored, and their target classes
# Changes to a valid call whose last row is ignored.
CHANGES = {
    "all logits of a row are -inf": _logits(-INF),
    "all logits of a row are inf": _logits(INF),
    "one logit is inf": _head(INF, 40),
    "one logit is -inf": _head(-INF, 40),
    "a target's logit is -inf": _head(-INF, 0),
    "one class of the head is nan": _head(NAN, 40),
    "a row is nan": _input(NAN),
    "a row is inf": _input(INF),
    "the bias masks all classes": _bias((slice(None), -INF)),
    "the bias masks one class": _bias((40, -INF)),
    "the bias masks a target": _bias((0, -INF)),
    "one bias is nan": _bias((40, NAN)),
    "all counted class weights are 0": _weight((_COUNTED, 0)),
    "the counted class weights add up to 0": _weight((0, -4)),
    "a class weight is nan": _weight((0, NAN)),
    "token weights add up to 0": _tokens(torch.tensor([-4, 1, 1, 1, 1, 5.0])),
    "all counted token weights are 0": _tokens(torch.tensor([0, 0, 0, 0, 0, 5.0])),
    "a token weight is nan": _tokens(torch.tensor([NAN, 1, 1, 1, 1, 1])),
    "a token weight is inf": _tokens(torch.tensor([INF, 1, 1, 1, 1, 1])),
    "a probability is nan": _probability(((1, 2), NAN)),
    "a probability is inf": _probability(((1, 2), INF)),
}
# On an NPU, nonfinite values in the head propagate through the product with the zeros of an ignored row.
SPREADING = ("one logit is inf", "one logit is -inf", "a target's logit is -inf", "one class of the head is nan")
COMPILED = ("the bias masks all classes", "all counted class weights are 0", "token weights add up to 0")
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
    """Return the loss and the gradients of input, head and bias."""
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
    input, head = make.normal(ROWS, FEATURES).float(), make.normal(CLASSES, FEATURES).float()
    changed = {"input": input, "head": head, **change(input, head)}
    tensors = changed.pop("input"), changed.pop("head"), _filled(torch.arange(ROWS), (-1, -100))
    return tensors, {**changed, **options}


def assert_nan_where_torchs_are(change, options, device="cpu", dtype=torch.float32, **ways):
    """Compare with torch; where torch's result is infinite, ours may be anything that is not finite."""
    tensors, options = tensors_and_options(change, options, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    results = loss_and_gradients(ours.linear_cross_entropy, tensors, {**options, **ways}, device, dtype)
    for result, expected in zip(results, loss_and_gradients(torchs, tensors, options), strict=True):
        _assert_nan_where(result, expected, tolerance)


def _assert_nan_where(result, expected, tolerance=1e-5):
    finite = expected.isfinite()
    torch.testing.assert_close(result[finite], expected[finite], rtol=tolerance, atol=tolerance)
    assert not result[~finite].isfinite().any()
    assert result[expected.isnan()].isnan().all()


@each_option
@each_change
@pytest.mark.parametrize("ways", [{}, {"chunk_size": 2}, {"max_memory": 20_000}], ids=str)
def test_loss_and_gradients_are_nan_where_torchs_are(change, options, ways):
    assert_nan_where_torchs_are(change, options, **ways)


@each_option
@each_change
@torch.no_grad()
def test_a_loss_without_gradients_is_nan_where_torchs_is(change, options):
    (input, head, target), options = tensors_and_options(change, options)
    target = options.pop("target", target)
    loss = ours.linear_cross_entropy(input, head, target, **options, chunk_size=2)
    _assert_nan_where(loss, torchs(input, head, target, **options))


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("name", COMPILED)
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


# Numbers that float32 cannot represent, divided by a temperature or not.
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
