"""CANN's functions, called directly by a program: two phases, on tensors that it describes."""

import ctypes
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests._aclnn import DType, Ints, Scalar, call, phase_one
from tests._values import moved

_CUBE = ctypes.c_int8(0)
_MEAN, _SUM, _BATCHMEAN = 1, 2, 3


def _positive(*shape):
    return torch.rand(shape) + 0.5


def _randn(*shape):
    return torch.randn(shape)


_X, _Y = (3, 4), (3, 4)
_UNARY = {
    "aclnnAbs": torch.abs,
    "aclnnCeil": torch.ceil,
    "aclnnCos": torch.cos,
    "aclnnErf": torch.erf,
    "aclnnExp": torch.exp,
    "aclnnFloor": torch.floor,
    "aclnnGelu": partial(F.gelu, approximate="tanh"),
    "aclnnLog": torch.log,
    "aclnnNeg": torch.neg,
    "aclnnReciprocal": torch.reciprocal,
    "aclnnRelu": torch.relu,
    "aclnnRsqrt": torch.rsqrt,
    "aclnnSigmoid": torch.sigmoid,
    "aclnnSilu": F.silu,
    "aclnnSin": torch.sin,
    "aclnnSqrt": torch.sqrt,
    "aclnnTanh": torch.tanh,
}
_BINARY = {
    "aclnnDiv": torch.div,
    "aclnnMaximum": torch.maximum,
    "aclnnMinimum": torch.minimum,
    "aclnnMul": torch.mul,
    "aclnnPowTensorTensor": torch.pow,
}
_DERIVATIVES = {
    "aclnnGeluBackward": (partial(F.gelu, approximate="tanh"), "input"),
    "aclnnSigmoidBackward": (torch.sigmoid, "result"),
    "aclnnSiluBackward": (F.silu, "input"),
    "aclnnTanhBackward": (torch.tanh, "result"),
}
_SCALARS = {
    "aclnnAdds": ([Scalar(2), Scalar(3)], lambda x: x + 6),
    "aclnnClamp": ([Scalar(0.75), Scalar(1.25)], lambda x: x.clamp(0.75, 1.25)),
    "aclnnDivs": ([Scalar(4)], lambda x: x / 4),
    "aclnnMuls": ([Scalar(3)], lambda x: x * 3),
    "aclnnPowTensorScalar": ([Scalar(3)], lambda x: x**3),
    "aclnnSubs": ([Scalar(2), Scalar(3)], lambda x: x - 6),
}
_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def _close(actual, expected):
    limit = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=limit, atol=limit)


@_DTYPES
@pytest.mark.parametrize("name", _UNARY)
def test_a_function_of_one_tensor(name, dtype):
    x = _positive(*_X).to(dtype)
    out = torch.empty_like(x).npu()
    call(name, x.npu(), out)
    _close(out, _UNARY[name](x.double()))


@_DTYPES
@pytest.mark.parametrize("name", _BINARY)
def test_a_function_of_two_tensors_that_broadcast(name, dtype):
    x, y = _positive(3, 1).to(dtype), _positive(4).to(dtype)
    out = torch.empty(3, 4, dtype=dtype).npu()
    call(name, x.npu(), y.npu(), out)
    _close(out, _BINARY[name](x.double(), y.double()))


@pytest.mark.parametrize(("name", "sign"), [("aclnnAdd", 1), ("aclnnSub", -1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_sums_have_a_factor(name, sign, dtype):
    x, y = (torch.randn(2, 3, 4) * 9).to(dtype)
    out = torch.empty_like(x).npu()
    call(name, x.npu(), y.npu(), Scalar(2), out)
    torch.testing.assert_close(out.cpu(), x + sign * 2 * y)


@pytest.mark.parametrize("name", _SCALARS)
def test_a_function_of_a_tensor_and_numbers(name):
    x = _positive(*_X)
    out = torch.empty_like(x).npu()
    numbers, expected = _SCALARS[name]
    call(name, x.npu(), *numbers, out)
    _close(out, expected(x.double()))


@pytest.mark.parametrize("name", _DERIVATIVES)
def test_a_derivative_of_one_tensor(name):
    function, of = _DERIVATIVES[name]
    x, grad = _randn(*_X), _randn(*_X)
    wide = x.double().requires_grad_()
    result = function(wide)
    result.backward(grad.double())
    out = torch.empty_like(x).npu()
    call(name, grad.npu(), (x if of == "input" else result.detach().float()).npu(), out)
    _close(out, wide.grad)


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("aclnnMatmul", (2, 3, 4), (4, 5)),
        ("aclnnMm", (3, 4), (4, 5)),
        ("aclnnBatchMatMul", (2, 3, 4), (2, 4, 5)),
    ],
)
@_DTYPES
def test_a_product_of_matrices(name, x, y, dtype):
    x, y = _randn(*x).to(dtype), _randn(*y).to(dtype)
    expected = x.double() @ y.double()
    out = torch.empty(expected.shape, dtype=dtype).npu()
    call(name, x.npu(), y.npu(), out, _CUBE)
    _close(out, expected)


def test_a_product_is_added():
    added, x, y = _randn(5), _randn(3, 4), _randn(4, 5)
    out = torch.empty(3, 5).npu()
    call("aclnnAddmm", added.npu(), x.npu(), y.npu(), Scalar(2), Scalar(3), out, _CUBE)
    _close(out, 2 * added.double() + 3 * (x.double() @ y.double()))


@pytest.mark.parametrize(
    ("name", "function"), [("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)], ids=["softmax", "logarithm"]
)
def test_softmax_and_its_derivative(name, function):
    x, grad = _randn(3, 4), _randn(3, 4)
    wide = x.double().requires_grad_()
    expected = function(wide, 1)
    expected.backward(grad.double())
    result, derivative = torch.empty_like(x).npu(), torch.empty_like(x).npu()
    call(f"aclnn{name}", x.npu(), 1, result)
    _close(result, expected.detach())
    call(f"aclnn{name}Backward", grad.npu(), result, 1, derivative)
    torch.testing.assert_close(derivative.cpu().double(), wide.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "function"), [("aclnnReduceSum", torch.sum), ("aclnnMean", torch.mean)])
@pytest.mark.parametrize("keeps", [False, True])
def test_dimensions_are_reduced(name, function, keeps):
    x = _randn(2, 3, 4)
    expected = function(x.double(), (0, 2), keepdim=keeps)
    out = torch.empty(expected.shape).npu()
    call(name, x.npu(), Ints([0, 2]), ctypes.c_bool(keeps), DType(torch.float32), out)
    _close(out, expected)


@pytest.mark.parametrize("order", [1, 2.5, float("inf")])
def test_a_norm_of_dimensions(order):
    x, out = _randn(2, 3, 4).half(), torch.empty(2, 1, 4).npu()
    call("aclnnLinalgVectorNorm", x.npu(), Scalar(order), Ints([1]), ctypes.c_bool(True), DType(torch.float32), out)
    _close(out, torch.linalg.vector_norm(x.double(), order, 1, True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_a_mean_of_integers_is_that_of_its_dtype(dtype):
    x = torch.tensor([[1, 2, 4], [7, 0, 5]], dtype=dtype)
    out = torch.empty(2).npu()
    call("aclnnMean", x.npu(), Ints([1]), ctypes.c_bool(False), DType(torch.float32), out)
    _close(out, x.double().mean(1))


def test_rows_are_chosen_added_joined_and_summed():
    x, index, source = _randn(4, 3), torch.tensor([2, 0, 2]), _randn(3, 3)
    chosen, added = torch.empty(3, 3).npu(), torch.empty(4, 3).npu()
    joined, running, one_of_two = torch.empty(7, 3).npu(), torch.empty(4, 3).npu(), torch.empty(4, 3).npu()
    call("aclnnIndexSelect", x.npu(), 0, index.npu(), chosen)
    call("aclnnIndexAddV2", x.npu(), 0, index.npu(), source.npu(), Scalar(2), 0, added)
    call("aclnnCat", [x.npu(), source.npu()], 0, joined)
    call("aclnnCumsum", x.npu(), 0, DType(torch.float32), running)
    call("aclnnSWhere", (x > 0).npu(), x.npu(), (-x).npu(), one_of_two)
    assert chosen.cpu().equal(x[index]) and joined.cpu().equal(torch.cat([x, source]))
    _close(added, x.double().index_add(0, index, source.double(), alpha=2))
    _close(running, x.double().cumsum(0))
    assert one_of_two.cpu().equal(x.abs())


def test_the_gradients_of_repeats_are_summed():
    repeats, grad = torch.tensor([2, 0, 3]), _randn(2, 5)
    out = torch.empty(2, 3).npu()
    call("aclnnRepeatInterleaveGrad", grad.npu(), repeats.npu(), 1, out)
    _close(out, torch.stack([grad[:, :2].sum(1), grad[:, :0].sum(1), grad[:, 2:].sum(1)], 1).double())


_REDUCTIONS = pytest.mark.parametrize("reduction", [_MEAN, _SUM], ids=["mean", "sum"])


def _of_mode(reduction):
    return {_MEAN: "mean", _SUM: "sum", _BATCHMEAN: "batchmean"}[reduction]


@_REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy_of_logits_and_its_derivative(weighted, reduction):
    x, target, weight, pos_weight = _randn(3, 4), torch.rand(3, 4), torch.rand(3, 4), torch.rand(4)
    factors = [weight, pos_weight] if weighted else [None, None]
    wide = x.double().requires_grad_()
    options = {"weight": weight.double(), "pos_weight": pos_weight.double()} if weighted else {}
    mode = _of_mode(reduction)
    expected = F.binary_cross_entropy_with_logits(wide, target.double(), reduction=mode, **options)
    expected.backward(torch.tensor(3.0).double())
    out, derivative = torch.empty(()).npu(), torch.empty(3, 4).npu()
    given = [x.npu(), target.npu(), *(None if each is None else each.npu() for each in factors), reduction]
    call("aclnnBinaryCrossEntropyWithLogits", *given, out)
    call("aclnnBinaryCrossEntropyWithLogitsBackward", torch.tensor(3.0).npu(), *given, derivative)
    _close(out, expected.detach())
    _close(derivative, wide.grad)


@pytest.mark.parametrize("reduction", [_MEAN, _SUM, _BATCHMEAN], ids=_of_mode)
@pytest.mark.parametrize("is_log", [False, True], ids=["probabilities", "logarithms"])
def test_the_derivatives_of_the_divergence(is_log, reduction):
    x, target = torch.randn(3, 4).log_softmax(-1), torch.randn(3, 4).softmax(-1)
    if is_log:
        target = target.log()
    else:
        target[0, 0] = 0
    wide = [each.double().requires_grad_() for each in (x, target)]
    F.kl_div(*wide, reduction=_of_mode(reduction), log_target=is_log).backward()
    grad, outs = torch.tensor(1.0).npu(), [torch.empty(3, 4).npu() for _ in range(2)]
    for name, out in zip(("aclnnKlDivBackward", "aclnnKlDivTargetBackward"), outs, strict=True):
        call(name, grad, x.npu(), target.npu(), reduction, ctypes.c_bool(is_log), out)
    _close(outs[0], wide[0].grad)
    assert wide[1].grad[0, 0].isfinite() or not is_log
    _close(outs[1][1:], wide[1].grad[1:])


@pytest.mark.parametrize("reduction", [_MEAN, _SUM, _BATCHMEAN], ids=_of_mode)
@pytest.mark.parametrize("shapes", [((3, 4), (1, 4)), ((1, 4), (3, 4))], ids=["target", "input"])
def test_the_divergence_is_of_what_both_broadcast_to(shapes, reduction):
    x, target = torch.randn(shapes[0]).log_softmax(-1), torch.randn(shapes[1]).softmax(-1)
    wide, out = x.double().requires_grad_(), torch.empty(shapes[0]).npu()
    F.kl_div(wide.expand(3, 4), target.double().expand(3, 4), reduction=_of_mode(reduction)).backward()
    call("aclnnKlDivBackward", torch.tensor(1.0).npu(), x.npu(), target.npu(), reduction, ctypes.c_bool(False), out)
    _close(out, wide.grad)


@_REDUCTIONS
def test_absolute_errors_and_their_derivative(reduction):
    x, target = _randn(3, 4), _randn(3, 4)
    wide = x.double().requires_grad_()
    expected = F.l1_loss(wide, target.double(), reduction=_of_mode(reduction))
    expected.backward()
    out, derivative = torch.empty(()).npu(), torch.empty(3, 4).npu()
    call("aclnnL1Loss", x.npu(), target.npu(), reduction, out)
    call("aclnnL1LossBackward", torch.tensor(1.0).npu(), x.npu(), target.npu(), reduction, derivative)
    _close(out, expected.detach())
    _close(derivative, wide.grad)


def test_views_are_read_and_written_where_they_lie():
    x, out = torch.randn(6, 8), torch.zeros(4, 6).npu()
    call("aclnnExp", x.npu().t()[2:5, 1::2], out[1:, ::2])
    expected = torch.zeros(4, 6, dtype=torch.float64)
    expected[1:, ::2] = x.t()[2:5, 1::2].double().exp()
    _close(out, expected)


def test_an_absent_approximation_is_that_of_erf():
    x, out = torch.randn(3, 8), torch.empty(3, 4, device="npu")
    call("aclnnGeluMul", x.npu(), None, out)
    _close(out, F.gelu(x.double()[:, :4]) * x.double()[:, 4:])


_CASTS = {
    **{name: () for name in sorted(_UNARY.keys() - {"aclnnGelu"})},
    **{name: (torch.ones(2, 3),) for name in _BINARY},
    "aclnnAdds": (Scalar(2), Scalar(3)),
    "aclnnMuls": (Scalar(2),),
    "aclnnClamp": (Scalar(0), Scalar(1)),
    "aclnnSoftmax": (-1,),
    "aclnnMm": (torch.ones(3, 3),),
    "aclnnMatmul": (torch.ones(3, 3),),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", _CASTS)
def test_an_output_that_torch_does_not_cast_to_is_refused(name, dtype):
    arguments = moved(_CASTS[name])
    cube = [_CUBE] * (name in ("aclnnMm", "aclnnMatmul"))
    out = torch.empty(2, 3, dtype=dtype, device="npu")
    status, message, _ = phase_one(name, torch.ones(2, 3).npu(), *arguments, out, *cube)
    assert status == 161002
    assert f"result type float32 can't be cast to the desired output type {str(dtype)[6:]}" in message


def test_an_output_that_torch_casts_to_is_taken():
    x, out = torch.tensor([[1, -2, 3]]), torch.empty(1, 3, dtype=torch.float16, device="npu")
    call("aclnnAbs", x.npu(), out)
    assert out.tolist() == [[1, 2, 3]]
    whole = torch.empty(1, 3, dtype=torch.int32, device="npu")
    call("aclnnMul", x.npu(), x.npu(), whole)
    assert whole.tolist() == [[1, 4, 9]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_dtype_that_is_refused_is_named(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(RuntimeError, match=rf"has dtype {name}, which the operator does not take on this chip"):
        torch.ones(2, device="npu").to(dtype)
