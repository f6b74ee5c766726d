"""CANN's functions as a program calls them that does not go by torch_npu: two phases, on tensors that it describes."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from tests._aclnn import call, phase_one
from tests._values import assert_near

_CUBE = ctypes.c_int8(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_version_of_gelu_and_its_derivative_approximate_by_tanh(dtype):
    x, grad = torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype)
    wide = x.double().requires_grad_()
    expected = F.gelu(wide, approximate="tanh")
    expected.backward(grad.double())
    out, derivative = torch.empty_like(x).npu(), torch.empty_like(x).npu()
    call("aclnnGelu", x.npu(), out)
    call("aclnnGeluBackward", grad.npu(), x.npu(), derivative)
    assert_near(out, expected.detach(), units=2)
    assert_near(derivative, wide.grad, units=2)


def test_views_are_read_and_written_where_they_lie():
    x, out = torch.randn(6, 8), torch.zeros(4, 6).npu()
    call("aclnnGelu", x.npu().t()[2:5, 1::2], out[1:, ::2])
    expected = torch.zeros(4, 6, dtype=torch.float64)
    expected[1:, ::2] = F.gelu(x.t()[2:5, 1::2].double(), approximate="tanh")
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2**-21, atol=2**-21)


def test_an_absent_approximation_is_that_of_erf():
    x, out = torch.randn(3, 8), torch.empty(3, 4, device="npu")
    call("aclnnGeluMul", x.npu(), None, out)
    assert_near(out, F.gelu(x.double()[:, :4]) * x.double()[:, 4:], units=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_an_output_that_torch_does_not_cast_to_is_refused(dtype):
    out = torch.empty(2, 3, dtype=dtype, device="npu")
    status, message, _ = phase_one("aclnnMm", torch.ones(2, 3).npu(), torch.ones(3, 3).npu(), out, _CUBE)
    assert status == 161002
    assert f"result type float32 can't be cast to the desired output type {str(dtype)[6:]}" in message


def test_an_output_that_torch_casts_to_is_taken():
    out = torch.empty(2, 3, dtype=torch.float16, device="npu")
    call("aclnnMm", torch.ones(2, 3).npu(), torch.ones(3, 3).npu(), out, _CUBE)
    assert out.tolist() == [[3] * 3] * 2


def test_the_softmax_of_scores_is_in_place_and_its_gradient_too():
    scores, grad, values = (torch.randn(shape) for shape in ((2, 3, 5), (2, 3, 4), (2, 5, 4)))
    wide = scores.double().requires_grad_()
    (wide.softmax(-1) @ values.double()).backward(grad.double())
    on_npu = scores.npu()
    torch_npu.npu_attn_softmax_(on_npu)
    assert_near(on_npu, scores.double().softmax(-1), units=2)
    torch_npu.npu_attn_softmax_backward_(on_npu, grad.npu(), values.npu())
    assert_near(on_npu, wide.grad, units=2)


def test_rows_are_added_at_indices_and_gradients_of_repeats_are_summed():
    x, index, source = torch.randn(4, 3), torch.tensor([2, 0, 2]), torch.randn(3, 3)
    added = torch.ops.npu._npu_index_add(x.npu(), index.npu(), source.npu(), alpha=2)
    assert_near(added, x.double().index_add(0, index, source.double(), alpha=2), units=2)
    repeats, grad, out = torch.tensor([2, 0, 3]), torch.randn(2, 5), torch.empty(2, 3).npu()
    call("aclnnRepeatInterleaveGrad", grad.npu(), repeats.npu(), 1, out)
    assert_near(out, torch.stack([grad[:, :2].sum(1), grad[:, :0].sum(1), grad[:, 2:].sum(1)], 1).double(), units=2)


_MODES = {1: "mean", 2: "sum"}
_REDUCTIONS = pytest.mark.parametrize("reduction", _MODES)


@_REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True])
def test_the_derivative_of_binary_cross_entropy_of_logits(weighted, reduction):
    x, target, weight, pos_weight = torch.randn(3, 4), torch.rand(3, 4), torch.rand(3, 4), torch.rand(4)
    factors = {"weight": weight, "pos_weight": pos_weight} if weighted else {}
    wide, options = x.double().requires_grad_(), {name: factor.double() for name, factor in factors.items()}
    F.binary_cross_entropy_with_logits(wide, target.double(), reduction=_MODES[reduction], **options).backward()
    out, given = (
        torch.empty(3, 4).npu(),
        [factors[name].npu() if weighted else None for name in ("weight", "pos_weight")],
    )
    call(
        "aclnnBinaryCrossEntropyWithLogitsBackward", torch.ones(()).npu(), x.npu(), target.npu(), *given, reduction, out
    )
    assert_near(out, wide.grad, units=2)


@_REDUCTIONS
@pytest.mark.parametrize("is_log", [False, True], ids=["probabilities", "logarithms"])
def test_the_derivatives_of_the_divergence(is_log, reduction):
    x, target = torch.randn(3, 4).log_softmax(-1), torch.randn(3, 4).softmax(-1)
    if is_log:
        target = target.log()
    else:
        target[0, 0] = 0
    wide = [each.double().requires_grad_() for each in (x, target)]
    F.kl_div(*wide, reduction=_MODES[reduction], log_target=is_log).backward()
    given = torch.ones(()).npu(), x.npu(), target.npu(), reduction, ctypes.c_bool(is_log)
    for name, expected in (("aclnnKlDivBackward", wide[0].grad), ("aclnnKlDivTargetBackward", wide[1].grad)):
        out = torch.empty(3, 4).npu()
        call(name, *given, out)
        # The derivative of 0 log 0 is infinite in PyTorch.
        assert_near(out[1:], expected[1:], units=4)


@_REDUCTIONS
def test_the_derivative_of_absolute_errors(reduction):
    x, target, out = torch.randn(3, 4), torch.randn(3, 4), torch.empty(3, 4).npu()
    wide = x.double().requires_grad_()
    F.l1_loss(wide, target.double(), reduction=_MODES[reduction]).backward()
    call("aclnnL1LossBackward", torch.ones(()).npu(), x.npu(), target.npu(), reduction, out)
    assert_near(out, wide.grad, units=2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_dtype_that_is_refused_is_named(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(RuntimeError, match=rf"has dtype {name}, which the operator does not take on this chip"):
        torch.ones(2, device="npu").to(dtype)
