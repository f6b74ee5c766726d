"""CANN's functions MseLoss and BinaryCrossEntropy, against float64."""

import pytest
import torch
from tests._aclnn import call, phase_one
from tests._values import DTYPES, assert_close, moved, random, transposed

_REDUCTIONS = pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
# The shapes of the gradient, the input and the target.
_SHAPES = [
    ((3, 5), (3, 5), (3, 5)),
    ((), (7, 300), (7, 300)),
    ((2, 2, 3, 2), (1, 2, 3, 2), (2, 2, 1, 2)),
    ((), (), ()),
    ((1,), (4, 1), (5,)),
]


def _reduced(losses, reduction):
    return (losses, losses.mean(), losses.sum())[reduction]


@DTYPES
@_REDUCTIONS
@pytest.mark.parametrize("shapes", _SHAPES, ids=str)
def test_mse_loss_and_its_gradient(shapes, reduction, dtype):
    grad, x, target = (random(shape, dtype, -3, 3) for shape in shapes)
    losses = (x.double() - target.double()).square()
    loss = torch.empty(losses.shape if reduction == 0 else (), dtype=dtype).npu()
    call("aclnnMseLoss", transposed(x), target.npu(), reduction, loss)
    assert_close(loss, _reduced(losses, reduction), 2)
    # A mean is over the input's elements, even if the input broadcasts.
    expected = (x.double() - target.double()) * grad.double() * (2 / x.numel() if reduction == 1 else 2)
    for place in (torch.Tensor.npu, transposed):
        out = torch.empty(expected.shape, dtype=dtype).npu()
        call("aclnnMseLossBackward", place(grad), place(x), place(target), reduction, out)
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_gradient_of_mse_loss_is_rounded_once_to_the_dtype_of_the_input(dtype):
    # If rounded after each step, the difference and the result would be one unit larger.
    x, difference = 1.0009765625, 1.00146484375
    inputs = [torch.tensor([value], dtype=torch.float16).npu() for value in (1.5, x, x - difference)]
    out = torch.empty(1, dtype=dtype).npu()
    call("aclnnMseLossBackward", *inputs, 0, out)
    assert out.tolist() == [3.00390625]


def test_the_gradient_of_mse_loss_is_written_into_a_view():
    storage = torch.full((8,), 7.0).npu()
    x = torch.arange(4.0).view(2, 2)
    call("aclnnMseLossBackward", x.npu(), x.npu(), torch.ones(2, 2).npu(), 1, storage.as_strided((2, 2), (1, 3), 1))
    assert storage.tolist() == [7, 0, 1, 7, 0, 3, 7, 7]


def test_the_gradient_of_mse_loss_of_special_values():
    inf, nan = torch.inf, torch.nan
    out = torch.empty(4).npu()
    x, grad = torch.tensor([inf, -inf, nan, 1e30]), torch.tensor([1, 1, 1, 1e30])
    call("aclnnMseLossBackward", grad.npu(), x.npu(), torch.ones(4).npu(), 1, out)
    torch.testing.assert_close(out.cpu(), torch.tensor([inf, -inf, nan, inf]), equal_nan=True)


_ROWS, _ONES = torch.arange(4.0).view(2, 2), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("x", "target", "reduction", "expected"),
    [
        (_ROWS, _ONES, 0, [[1, 0], [1, 4]]),
        (_ROWS, _ONES, 1, [1, 2]),
        (_ROWS, _ONES, 2, [2, 4]),
        (_ROWS, torch.arange(6.0).view(3, 1, 2), 2, [[20, 20], [8, 8]]),
        (torch.arange(4.0), torch.ones(1), 1, 1.5),
    ],
)
def test_the_other_mse_loss_is_reduced_over_the_first_dimension(x, target, reduction, expected):
    out = torch.empty(torch.tensor(expected).shape).npu()
    call("aclnnMseLossOut", x.npu(), target.npu(), reduction, out)
    assert out.tolist() == expected


@pytest.mark.parametrize(("target", "named"), [(torch.ones(2, 3).half(), "float16"), (torch.ones(2, 3), "reduction")])
def test_dtypes_are_refused_before_a_reduction_and_that_before_shapes(target, named):
    status, message, _ = phase_one("aclnnMseLossBackward", *moved([_ROWS, _ROWS, target, 3, _ROWS]))
    assert status == 161002 and named in message


@DTYPES
@_REDUCTIONS
@pytest.mark.parametrize("shape", [(6, 210), ()], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_binary_cross_entropy(weighted, shape, reduction, dtype):
    grad, x = random(shape, dtype, -2, 2), random((6, 210), dtype, 0.02, 0.98)
    target, weight = random((6, 210), dtype, 0, 1), random((210,), dtype, 0, 2)
    out = torch.empty(6, 210, dtype=dtype).npu()
    given = weight.npu() if weighted else None
    call("aclnnBinaryCrossEntropyBackward", grad.npu(), transposed(x), target.npu(), given, reduction, out)
    wide = x.double()
    expected = (wide - target.double()) / (wide * (1 - wide)) * grad.double()
    expected *= weight.double() if weighted else 1
    assert_close(out, expected / (x.numel() if reduction == 1 else 1), 2)


def test_the_gradient_of_binary_cross_entropy_has_a_bounded_denominator_and_any_input():
    x, out = torch.tensor([0, 1, 2, torch.nan]), torch.empty(4).npu()
    call("aclnnBinaryCrossEntropyBackward", torch.ones(4).npu(), x.npu(), torch.full((4,), 0.5).npu(), None, 0, out)
    torch.testing.assert_close(out.cpu(), torch.tensor([-0.5e12, 0.5e12, 1.5e12, torch.nan]), equal_nan=True)


@DTYPES
@pytest.mark.parametrize("reduction", [0, 1], ids=["none", "mean"])
def test_binary_cross_entropy_bounds_the_logarithms(reduction, dtype):
    x, target = (random((3, 700), dtype, low, high) for low, high in ((0.01, 0.99), (0, 1)))
    weight = random((700,), dtype, 0, 2)
    x[0, :2] = torch.tensor([0, 1])
    out = torch.empty((3, 700) if reduction == 0 else (), dtype=dtype).npu()
    call("aclnnBinaryCrossEntropy", x.npu(), target.npu(), weight.npu(), reduction, out)
    wide, y = x.double(), target.double()
    losses = -(y * wide.log().clamp(-100) + (1 - y) * (-wide).log1p().clamp(-100)) * weight.double()
    assert_close(out, _reduced(losses, reduction), 2)
