"""mse_loss: the drop-in, its Function and the raw operator; features shared by losses of an input and a target."""

from functools import partial

from torch_aclnn_ops import explain, ops
from torch_aclnn_ops import functional as ours
from torch_aclnn_ops.ops.mse_loss import formula

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import _torchs as torchs
from tests._contract import Case, DropInContract, Maker, assert_same_outcome, outcome
from tests._raw_operator import RawOperatorContract, Sample, error_inputs


def _call(**options):
    return lambda F, input, target: F.mse_loss(input, target, **options)


def _weighted(**options):
    return lambda F, input, target, weight: F.mse_loss(input, target, weight=weight, **options)


def _two(shape, other=None):
    return lambda make: (make.normal(*shape), make.normal(*(shape if other is None else other)))


def _two_and_weight(make):
    return make.normal(4, 3), make.normal(4, 3), make.probability(4, 3)


CASES = [
    Case("mean", _two((3, 5)), _call()),
    Case("sum of an odd shape", _two((7, 1, 3)), _call(reduction="sum")),
    Case("none", _two((2, 3)), _call(reduction="none")),
    Case("zero dimensions", _two(()), _call()),
    Case("no elements, none", _two((0, 3)), _call(reduction="none")),
    Case("no elements, sum", _two((3, 0)), _call(reduction="sum")),
    Case("not contiguous", _two((5, 3)), lambda F, x, t: F.mse_loss(x.T, t.T[:, ::1])),
    Case("strided", _two((6, 4)), lambda F, x, t: F.mse_loss(x[::2, 1:], t[1::2, :3], reduction="none")),
    Case("broadcast target", _two((4, 3), (3,)), _call()),
    Case("broadcast input", _two((1, 3), (4, 3)), _call(reduction="none")),
    Case("broadcast both", _two((4, 1), (1, 3)), _call(reduction="sum")),
    Case("weighted mean", _two_and_weight, _weighted()),
    Case("weighted sum", _two_and_weight, _weighted(reduction="sum")),
    Case("weighted none", _two_and_weight, _weighted(reduction="none")),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
class TestDropIn(DropInContract):
    CASES = CASES


_dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
_shapes = st.sampled_from([(), (1,), (3,), (4, 3), (4, 1), (1, 3), (0, 3), (2, 4, 3), (5,)])
_flags = st.sampled_from([None, True, False])


@given(
    shapes=st.tuples(_shapes, _shapes, st.none() | _shapes),
    dtypes=st.tuples(_dtypes, _dtypes),
    reduction=st.sampled_from(["mean", "sum", "none", "elementwise_mean", "average"]),
    size_average=_flags,
    reduce=_flags,
)
def test_any_call_behaves_like_torchs(shapes, dtypes, reduction, size_average, reduce):
    input, target = (Maker(dtypes[seed], seed).normal(*shapes[seed]) for seed in range(2))
    weight = None if shapes[2] is None else Maker(torch.float32, 2).probability(*shapes[2])
    inputs = [tensor.requires_grad_() for tensor in (input, target) if tensor.is_floating_point()]
    mine, theirs = (
        outcome(partial(module.mse_loss, input, target, size_average, reduce, reduction, weight), inputs)
        for module in (ours, torchs.functional)
    )
    tolerance = max(torch.finfo(tensor.dtype).eps for tensor in inputs) * 8 if inputs else 0
    assert_same_outcome(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["elementwise_mean", "average"])
@pytest.mark.parametrize("shape", [(0, 3), (4,)], ids=str)
def test_shapes_that_do_not_broadcast_raise_before_an_invalid_reduction_as_in_torch(reduction, shape):
    call = partial(_call(reduction=reduction), input=torch.zeros(4, 3), target=torch.zeros(shape))
    mine, theirs = (outcome(partial(call, module), []) for module in (ours, torchs.functional))
    assert mine == theirs and mine[0] == "raised"


def test_the_broadcast_warning_points_at_the_caller():
    with pytest.warns(UserWarning, match=r"Using a target size \(torch.Size\(\[3\]\)\)") as caught:
        ours.mse_loss(torch.zeros(2, 3), torch.zeros(3))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("target", [torch.zeros(2), torch.zeros(3).double()], ids=["another shape", "another dtype"])
def test_the_autograd_function_raises_for_unsupported_arguments(target):
    with pytest.raises(ValueError, match=r"MSELossFunction: target must have input's shape and dtype"):
        ours.MSELossFunction.apply(torch.zeros(3), target, 1)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weighted_loss_has_torchs_dtype_under_autocast(reduction, dtype):
    tensors = [torch.rand(4, 3).to(dtype) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = (_weighted(reduction=reduction)(module, *tensors) for module in (ours, torch.nn.functional))
    assert mine.dtype == theirs.dtype


def test_the_raw_operator_rounds_a_mean_over_many_float16_elements_once():
    input, target = torch.linspace(0, 1, 70000).half(), torch.zeros(70000).half()
    given = torch.tensor(1024.0).half(), input, target
    gradient, truth = (ops.mse_loss_backward(*each, 1) for each in (given, [one.double() for one in given]))
    torch.testing.assert_close(gradient, truth.half(), rtol=0, atol=2**-24)


def test_the_tangent_of_a_mean_over_many_float16_elements():
    # The gradient of an element, 2 * 2**-10 / 2**16, is 0 in float16.
    input, target, ones = (torch.full((2**16,), number, dtype=torch.float16) for number in (2**-10, 0, 1))
    assert torch.func.jvp(lambda input: ours.mse_loss(input, target), (input,), (ones,))[1] == 2**-9


def _channels_last(make):
    return make.normal(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)


_AS_SELF = "must have dtype torch.float32 as self has, but it has"
ERRORS = {
    "dtype of grad_output": (0, Tensor.half, TypeError, f"grad_output {_AS_SELF} torch.float16"),
    "dtype of target": (2, Tensor.double, TypeError, f"target {_AS_SELF} torch.float64"),
    "integers": ((0, 1, 2), Tensor.long, TypeError, "self must have a floating-point dtype, but it has torch.int64"),
    "reduction": (3, lambda _: 3, ValueError, r"reduction must be 0 \(none\), 1 \(mean\) or 2 \(sum\), but it is 3"),
    "shapes": (
        2,
        lambda _: torch.ones(4),
        ValueError,
        r"the shapes must broadcast together, but they are grad_output \[3\], self \[3\], target \[4\]",
    ),
}


class TestRawOperator(RawOperatorContract):
    OPERATOR = ops.mse_loss_backward
    SAMPLES = [
        Sample("mean", lambda make: (make.normal(), make.normal(3, 4), make.normal(3, 4), 1)),
        Sample("sum", lambda make: (make.normal(), make.normal(3, 4), make.normal(3, 4), 2)),
        Sample("none", lambda make: (make.normal(3, 4), make.normal(3, 4), make.normal(3, 4), 0)),
        Sample("broadcast", lambda make: (make.normal(3, 4), make.normal(4), make.normal(3, 1), 1)),
        Sample("zero dimensions", lambda make: (make.normal(), make.normal(), make.normal(), 1)),
        Sample("no elements", lambda make: (make.normal(), make.normal(0, 4), make.normal(0, 4), 1)),
        Sample("not contiguous", lambda make: (make.normal(4, 3).T, make.normal(3, 8)[:, ::2], make.normal(3, 4), 0)),
        Sample("transposed", lambda make: (make.normal(4, 3).T, make.normal(4, 3).T, make.normal(4, 3).T, 0)),
        Sample("channels last", lambda make: (make.normal(), _channels_last(make), _channels_last(make), 1)),
        Sample("transposed broadcast", lambda make: (make.normal(4, 3).T, make.normal(4, 3).T, make.normal(4), 0)),
        Sample("nine dimensions", lambda make: (make.normal(), make.normal(*[2] * 9), make.normal(*[2] * 9), 1)),
    ]
    ERROR_INPUTS = error_inputs(lambda make: (make.normal(3), make.normal(3), make.normal(3), 1), ERRORS)


def test_the_mean_is_over_the_elements_of_self():
    # aclnnMseLossBackward divides by numel(self), whatever the broadcast shape.
    gradient = ops.mse_loss_backward(torch.ones(()), torch.ones(1, 2), torch.zeros(3, 2), 1)
    torch.testing.assert_close(gradient, torch.full((3, 2), 2 / 2))


def test_the_example_of_the_cann_documentation():
    values = torch.arange(4.0).reshape(2, 2)
    gradient = ops.mse_loss_backward(values, values, torch.ones(2, 2), 1)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0], [1.0, 3.0]]))


def test_16_bit_values_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    grad, input, target = (torch.randn(1000, generator=generator).bfloat16() for _ in range(3))
    exact = formula(grad.double(), input.double(), target.double(), 2)
    assert torch.equal(formula(grad, input, target, 2), exact.float().bfloat16())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_weighted_loss_does_not_fall_back_to_torch(reduction):
    input, target, weight = torch.rand(3, requires_grad=True), torch.rand(3), torch.rand(3)
    said = explain(ours.mse_loss, input, target, reduction=reduction, weight=weight)
    assert said.startswith("mse_loss_backward: ")
