"""Products of 16-bit matrices on the host NPU are computed in float32 and rounded once, as on a device."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from tests._process import on_npu

_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@dataclass(frozen=True)
class _Product:
    """A function of tensors of these shapes; the last tensor of a derivative is the gradient of the result."""

    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    has_derivative: bool = False


def _in_place(name: str) -> Callable[..., torch.Tensor]:
    def function(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        assert getattr(result, name)(*others, beta=0.3, alpha=0.7) is result
        return result

    return function


def _strided_out(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_zeros(right.shape[1], 2 * left.shape[0])[:, ::2].t()
    assert torch.mm(left, right, out=out) is out
    return out


def _out_of_no_elements(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_empty(0)
    assert torch.mm(left, right, out=out) is out
    return out


def _out_that_is_an_argument(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = bias.clone()
    return torch.addmm(out, left, right, out=out)


@torch.inference_mode()
def _recurrent(make: Callable[..., torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    module = make(8, 8).to(x)
    for parameter in module.parameters():
        values = torch.arange(parameter.numel()).remainder(7).sub(3).div(8)
        parameter.data = values.view_as(parameter).to(x)
    return module(x)[0]


@torch.no_grad()
def _multi_head_attention(x: torch.Tensor, weight: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).to(x).eval()
    module.in_proj_weight.data, module.out_proj.weight.data = weight, projection
    return module(x, x, x, need_weights=False)[0]


_scaled = functools.partial(torch.addmm, beta=0.3, alpha=0.7)
_GRADIENTS = {
    "linear": _Product(F.linear, ((5, 7, 65), (33, 65), (5, 7, 33)), True),
    "matmul": _Product(torch.matmul, ((4, 7, 65), (4, 65, 33), (4, 7, 33)), True),
    "conv1d": _Product(F.conv1d, ((2, 6, 19), (4, 6, 3), (4,), (2, 4, 17)), True),
    "conv2d": _Product(F.conv2d, ((2, 6, 9, 8), (4, 6, 3, 3), (4,), (2, 4, 7, 6)), True),
    "conv_transpose2d": _Product(F.conv_transpose2d, ((2, 6, 9, 8), (6, 4, 3, 3), (4,), (2, 4, 11, 10)), True),
}
_PRODUCTS = {
    "mm": _Product(torch.mm, ((33, 65), (65, 29))),
    "mm of transposed tensors": _Product(lambda a, b: torch.mm(a.t(), b.t()), ((65, 33), (29, 65))),
    "mm of slices": _Product(lambda a, b: torch.mm(a[:, ::2], b[3:, ::3]), ((33, 130), (68, 87))),
    "mm of an expanded tensor": _Product(lambda a, b: torch.mm(a.expand(33, 65), b), ((1, 65), (65, 29))),
    "mm into a given tensor": _Product(_strided_out, ((33, 65), (65, 29))),
    "mm into a tensor of no elements": _Product(_out_of_no_elements, ((33, 65), (65, 29))),
    "mm of no elements": _Product(torch.mm, ((33, 0), (0, 29))),
    "addmm": _Product(_scaled, ((33, 29), (33, 65), (65, 29))),
    "addmm of a row": _Product(_scaled, ((29,), (33, 65), (65, 29))),
    "addmm in place": _Product(_in_place("addmm_"), ((33, 29), (33, 65), (65, 29))),
    "addmm into its argument": _Product(_out_that_is_an_argument, ((33, 29), (33, 65), (65, 29))),
    "bmm": _Product(torch.bmm, ((3, 17, 65), (3, 65, 29))),
    "baddbmm": _Product(functools.partial(torch.baddbmm, beta=0.3, alpha=0.7), ((3, 17, 29), (3, 17, 65), (3, 65, 29))),
    "baddbmm in place": _Product(_in_place("baddbmm_"), ((3, 17, 29), (3, 17, 65), (3, 65, 29))),
    "addbmm": _Product(torch.addbmm, ((17, 29), (3, 17, 65), (3, 65, 29))),
    "mv": _Product(torch.mv, ((33, 65), (65,))),
    "addmv": _Product(functools.partial(torch.addmv, beta=0.3, alpha=0.7), ((33,), (33, 65), (65,))),
    "dot": _Product(torch.dot, ((999,), (999,))),
    "matmul": _Product(torch.matmul, ((2, 3, 17, 65), (65, 29))),
    "matmul while nothing is derived": _Product(torch.inference_mode()(torch.matmul), ((2, 3, 17, 65), (65, 29))),
    "linear": _Product(F.linear, ((5, 7, 65), (33, 65), (33,))),
    "einsum": _Product(functools.partial(torch.einsum, "bij,bjk->bik"), ((3, 17, 65), (3, 65, 29))),
    "conv_tbc": _Product(torch.conv_tbc, ((9, 2, 6), (3, 6, 4), (4,))),
    "LSTM": _Product(functools.partial(_recurrent, torch.nn.LSTM), ((5, 2, 8),)),
    "GRU": _Product(functools.partial(_recurrent, torch.nn.GRU), ((5, 2, 8),)),
    "MultiheadAttention": _Product(_multi_head_attention, ((3, 5, 8), (24, 8), (8, 8))),
    **{f"derivatives of {name}": product for name, product in _GRADIENTS.items()},
}


def _results(product: _Product, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not product.has_derivative:
        return [product.function(*tensors)]
    *tensors, grad_output = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = product.function(*leaves)
    found = torch.autograd.grad(result, leaves, grad_output, allow_unused=True)
    return [result.detach(), *(gradient for gradient in found if gradient is not None)]


@_DTYPES
@pytest.mark.parametrize("name", _PRODUCTS)
def test_the_result_is_float32s_rounded_once(name, dtype):
    product = _PRODUCTS[name]
    tensors = [torch.randn(shape).to(dtype) for shape in product.shapes]
    found = _results(product, [tensor.to("npu") for tensor in tensors])
    expected = _results(product, [tensor.float() for tensor in tensors])
    for result, wide in zip(found, expected, strict=True):
        assert result.dtype == dtype and torch.equal(result.cpu(), wide.to(dtype).cpu())


@_DTYPES
def test_a_product_is_not_rounded_before_something_is_added(dtype):
    # The product is slightly more than 1, which 16 bits lose, and is added to a number whose neighbors are 2 apart.
    epsilon = torch.finfo(dtype).eps
    left = torch.tensor([[1.0, epsilon / 2]], dtype=dtype, device="npu")
    number = torch.full((1, 1), 2 / epsilon, dtype=dtype, device="npu")
    assert (torch.addmm(number, left, torch.ones_like(left).t()) - number).item() == 2


def test_dtypes_that_differ_are_refused_as_on_a_cpu():
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        torch.mm(torch.ones(2, 2, dtype=torch.float16, device="npu"), torch.ones(2, 2, device="npu"))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left.to("npu"), right.to("npu")).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
def test_other_dtypes_are_computed_as_on_a_cpu(dtype):
    left, right = (torch.arange(math.prod(shape)).view(shape).to(dtype) for shape in ((3, 4), (4, 5)))
    # A device refuses these dtypes.
    assert torch.equal(on_npu(_product, left, right, HOST_NPU_DTYPES="torch"), torch.mm(left, right))
