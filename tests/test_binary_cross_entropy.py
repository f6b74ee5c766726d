"""binary_cross_entropy: the drop-in, its Function and the raw operator."""

import importlib
from contextlib import nullcontext
from functools import partial

from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import ops, report

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests._contract import HALF_DTYPES, Case, DropInContract, Maker, assert_same_outcome, outcome
from tests._raw_operator import ErrorInput, RawOperatorContract, Sample, error_inputs


def _two(*shape):
    return lambda make: (make.probability(*shape), make.probability(*shape))


def _call(**options):
    return lambda F, input, target: F.binary_cross_entropy(input, target, **options)


def _weighted(**options):
    return lambda F, input, target, weight: F.binary_cross_entropy(input, target, weight, **options)


def _weight(*shape):
    return lambda make: (make.probability(*shape),)


CASES = [
    Case("mean", _two(3, 5), _call()),
    Case("sum of an odd shape", _two(7, 1, 3), _call(reduction="sum")),
    Case("none", _two(2, 3), _call(reduction="none")),
    Case("zero dimensions", _two(), _call()),
    Case("no elements", _two(0, 3), _call(reduction="none")),
    Case("not contiguous", _two(5, 3), lambda F, x, t: F.binary_cross_entropy(x.T, t.T)),
    Case("strided", _two(6, 4), lambda F, x, t: F.binary_cross_entropy(x[::2, 1:], t[1::2, :3], reduction="none")),
    Case("weighted mean", _two(4, 3), _weighted(), _weight(4, 3)),
    Case("weighted sum, broadcast weight", _two(4, 3), _weighted(reduction="sum"), _weight(3)),
    Case("weighted none, broadcast weight", _two(4, 3), _weighted(reduction="none"), _weight(4, 1)),
]


class TestDropIn(DropInContract):
    CASES = CASES


_dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
_shapes = st.sampled_from([(), (1,), (3,), (4, 3), (4, 1), (0, 3), (2, 4, 3)])
_flags = st.sampled_from([None, True, False])


@given(
    shape=_shapes,
    other_shape=st.none() | _shapes,
    weight_shape=st.none() | _shapes,
    dtypes=st.tuples(_dtypes, st.none() | _dtypes, st.none() | _dtypes),
    outside=st.sampled_from([0.0, 0.0, 0.0, 2.0]),
    weight_requires_grad=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none", "elementwise_mean", "average"]),
    size_average=_flags,
    reduce=_flags,
)
def test_any_call_behaves_like_torchs(
    shape, other_shape, weight_shape, dtypes, outside, weight_requires_grad, reduction, size_average, reduce
):
    input = Maker(dtypes[0], 0).probability(*shape) + torch.tensor(outside).to(dtypes[0])
    target = Maker(dtypes[1] or dtypes[0], 1).probability(*(shape if other_shape is None else other_shape))
    weight = None if weight_shape is None else Maker(dtypes[2] or dtypes[0], 2).probability(*weight_shape)
    inputs = [tensor.requires_grad_() for tensor in (input, target) if tensor.is_floating_point()]
    if weight is not None and weight.is_floating_point() and weight_requires_grad:
        inputs.append(weight.requires_grad_())
    mine, theirs = (
        outcome(partial(module.binary_cross_entropy, input, target, weight, size_average, reduce, reduction), inputs)
        for module in (ours, torch.nn.functional)
    )
    tolerance = max(torch.finfo(tensor.dtype).eps for tensor in inputs) * 16 if inputs else 0
    assert_same_outcome(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("input", [0.0, 1.0])
@pytest.mark.parametrize("target", [0.0, 0.25, 1.0])
def test_probabilities_of_0_and_1_give_torchs_loss_and_gradient(input, target):
    results = []
    for module in (ours, torch.nn.functional):
        probability = torch.tensor([input], requires_grad=True)
        loss = module.binary_cross_entropy(probability, torch.tensor([target]))
        loss.backward()
        results.append((loss.item(), probability.grad.item()))
    assert results[0] == pytest.approx(results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF_DTYPES], ids=str)
@pytest.mark.parametrize("listening", [False, True], ids=["C++", "Python"])
def test_the_gradient_of_a_certain_and_right_probability_is_0(dtype, listening):
    # torch's float16 kernel gives NaN, because its lower bound of the denominator is 0.
    edges = torch.tensor([0.0, 1.0], dtype=dtype, requires_grad=True)
    with report() if listening else nullcontext():
        ours.binary_cross_entropy(edges, edges.detach()).backward()
    assert torch.equal(edges.grad, torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("of_target", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16], ids=str)
def test_probabilities_of_both_dtypes_run_in_float32_under_autocast(of_input, of_target):
    input = torch.tensor([0.25], dtype=of_input, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours.binary_cross_entropy(input, torch.tensor([1.0], dtype=of_target))
    loss.backward()
    assert loss.dtype == torch.float32 and input.grad.dtype == of_input
    assert (loss.item(), input.grad.item()) == pytest.approx((1.3862944, -4.0))


@pytest.mark.parametrize("name", ["target", "weight"])
def test_the_autograd_function_raises_for_unsupported_arguments(name):
    tensors = {"target": torch.rand(3), "weight": torch.rand(3), name: torch.rand(1)}
    with pytest.raises(ValueError, match=f"BinaryCrossEntropyFunction: {name} must have input's shape and dtype"):
        ours.BinaryCrossEntropyFunction.apply(torch.rand(3), tensors["target"], tensors["weight"], 1)


def test_the_autograd_function_raises_for_a_weight_that_requires_grad():
    weight = torch.rand(3, requires_grad=True)
    loss = ours.BinaryCrossEntropyFunction.apply(torch.rand(3), torch.rand(3), weight, 1)
    with pytest.raises(RuntimeError, match="no derivative with respect to weight; detach it"):
        loss.backward()


def _grad_self_target(make, *shape):
    return make.normal(*shape), make.probability(*shape), make.probability(*shape)


def test_the_raw_operator_bounds_the_denominator_in_float16():
    ones, edges = torch.ones(2).half(), torch.tensor([0.0, 1.0]).half()
    gradient = ops.binary_cross_entropy_backward(ones * 0.0, edges, 1 - edges, None, 0)
    assert torch.equal(gradient, torch.zeros(2).half())


_NO_FLOAT = "must have a floating-point dtype, but it has torch.int64"
_REDUCTION = r"reduction must be 0 \(none\), 1 \(mean\) or 2 \(sum\), but it is -1"
_BROADCAST = r"must broadcast to self's shape \[3\], but its shape is"


class TestRawOperator(RawOperatorContract):
    OPERATOR = ops.binary_cross_entropy_backward
    SAMPLES = [
        Sample("mean", lambda make: (*_grad_self_target(make, 3, 4), None, 1), (0, 1, 2)),
        Sample("sum", lambda make: (*_grad_self_target(make, 3, 4), None, 2), (0, 1)),
        Sample("none", lambda make: (*_grad_self_target(make, 3, 4), None, 0), (1, 2)),
        Sample("weight", lambda make: (*_grad_self_target(make, 3, 4), make.normal(4), 1), (0, 1, 2, 3)),
        Sample(
            "everything broadcast",
            lambda make: (make.normal(), make.probability(3, 4), make.probability(4), make.normal(3, 1), 1),
            (0, 1, 2, 3),
        ),
        Sample("zero dimensions", lambda make: (*_grad_self_target(make), None, 1)),
        Sample("no elements", lambda make: (*_grad_self_target(make, 0, 4), None, 1)),
        Sample(
            "not contiguous",
            lambda make: (make.normal(4, 3).T, make.probability(3, 8)[:, ::2], make.probability(3, 4), None, 0),
        ),
        Sample(
            "transposed",
            lambda make: (make.normal(4, 3).T, make.probability(4, 3).T, make.probability(4, 3).T, None, 0),
        ),
        Sample("nine dimensions", lambda make: (*_grad_self_target(make, *[2] * 9), None, 1)),
    ]
    ERROR_INPUTS = [
        *error_inputs(
            lambda make: (*_grad_self_target(make, 3), None, 1),
            {
                "integers": ((0, 1, 2), torch.Tensor.long, TypeError, f"self {_NO_FLOAT}"),
                "integer weight": (3, lambda _: torch.ones(3).long(), TypeError, f"weight {_NO_FLOAT}"),
                "larger target": (2, lambda t: t.expand(2, 3), ValueError, rf"target {_BROADCAST} \[2, 3\]"),
                "weight of another shape": (3, lambda _: torch.ones(2), ValueError, rf"weight {_BROADCAST} \[2\]"),
                "reduction": (4, lambda _: -1, ValueError, _REDUCTION),
            },
        ),
        ErrorInput(
            "grad_output with more dimensions than self",
            lambda make: (make.normal(1), make.probability(), make.probability(), None, 1),
            ValueError,
            r"grad_output must broadcast to self's shape \[\], but its shape is \[1\]",
        ),
    ]


def test_the_example_of_the_cann_documentation():
    ones = torch.ones(2, 2)
    gradient = ops.binary_cross_entropy_backward(ones * 0.1, ones * 0.3, ones * 0.5, ones, 0)
    torch.testing.assert_close(gradient, ones * -0.095238, rtol=1e-5, atol=0)


def test_the_denominator_is_clamped_at_1e_12_and_not_the_probability():
    probability = torch.tensor([0.0, 1.0, 1.5], dtype=torch.float64)
    gradient = ops.binary_cross_entropy_backward(torch.ones(()).double(), probability, torch.zeros(3).double(), None, 0)
    torch.testing.assert_close(gradient, probability / 1e-12)


@pytest.mark.parametrize("reduction", range(3))
def test_the_formula_for_compiled_code_has_the_tangent_of_the_weight(reduction):
    module = importlib.import_module("torch_aclnn_ops.functional.binary_cross_entropy")
    probability, target, weight = torch.rand(3, 4, 5, dtype=torch.float64)
    loss = partial(module._formula, probability, target, reduction=reduction)
    assert torch.autograd.gradcheck(loss, weight.requires_grad_(), check_forward_ad=True, check_backward_ad=False)


def test_mixed_dtypes_give_the_dtype_of_self():
    exact = ops.binary_cross_entropy_backward(
        torch.ones(3).double(), torch.full((3,), 0.3).half().double(), torch.full((3,), 0.5).double(), None, 1
    )
    mixed = ops.binary_cross_entropy_backward(
        torch.ones(3).bfloat16(), torch.full((3,), 0.3).half(), torch.full((3,), 0.5), None, 1
    )
    assert torch.equal(mixed, exact.float().half())


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_gradient_of_a_16_bit_target_is_rounded_once(dtype):
    input, target = torch.rand(2, 500, generator=torch.Generator().manual_seed(0)).clamp(0.01, 0.99).to(dtype).unbind()
    target.requires_grad_()
    [gradient] = torch.autograd.grad(ours.binary_cross_entropy(input, target, reduction="sum"), target)
    truth = (-input.double()).log1p() - input.double().log()
    assert ((gradient.double() - truth).abs() <= 0.51 * torch.finfo(dtype).eps * truth.abs()).all()
