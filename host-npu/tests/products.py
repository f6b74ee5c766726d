"""Compare 16-bit products on the host NPU with float32's rounded once; run by test_products.py."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Product:
    """A function of tensors of these shapes; a derivative's last tensor is the gradient of the result."""

    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    has_derivative: bool = False
    # Whose float32 is rounded: attention's is a formula of the host NPU's, with sums in another order than the CPU's.
    float32_of: str = "cpu"


def in_place(name: str) -> Callable[..., torch.Tensor]:
    def function(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        assert getattr(result, name)(*others, beta=0.3, alpha=0.7) is result
        return result

    return function


def strided_out(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_zeros(right.shape[1], 2 * left.shape[0])[:, ::2].t()
    assert torch.mm(left, right, out=out) is out
    return out


def out_of_no_elements(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_empty(0)
    assert torch.mm(left, right, out=out) is out
    return out


def out_that_is_an_argument(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = bias.clone()
    return torch.addmm(out, left, right, out=out)


@torch.inference_mode()
def recurrent(make: Callable[..., torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    module = make(8, 8).to(x)
    for parameter in module.parameters():
        values = torch.arange(parameter.numel()).remainder(7).sub(3).div(8)
        parameter.data = values.view_as(parameter).to(x)
    return module(x)[0]


@torch.no_grad()
def multi_head_attention(x: torch.Tensor, weight: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).to(x).eval()
    module.in_proj_weight.data, module.out_proj.weight.data = weight, projection
    return module(x, x, x, need_weights=False)[0]


scaled = functools.partial(torch.addmm, beta=0.3, alpha=0.7)
heads = (2, 3, 17, 8)
gradients = {
    "linear": Product(F.linear, ((5, 7, 65), (33, 65), (5, 7, 33)), True),
    "matmul": Product(torch.matmul, ((4, 7, 65), (4, 65, 33), (4, 7, 33)), True),
    "conv1d": Product(F.conv1d, ((2, 6, 19), (4, 6, 3), (4,), (2, 4, 17)), True),
    "conv2d": Product(F.conv2d, ((2, 6, 9, 8), (4, 6, 3, 3), (4,), (2, 4, 7, 6)), True),
    "conv_transpose2d": Product(F.conv_transpose2d, ((2, 6, 9, 8), (6, 4, 3, 3), (4,), (2, 4, 11, 10)), True),
    "attention": Product(F.scaled_dot_product_attention, (heads,) * 4, True, "npu"),
    "causal attention": Product(
        functools.partial(F.scaled_dot_product_attention, is_causal=True), (heads,) * 4, True, "npu"
    ),
    "attention with a mask": Product(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask.detach()),
        (heads,) * 3 + ((17, 17), heads),
        True,
        "npu",
    ),
    "attention of groups": Product(
        functools.partial(F.scaled_dot_product_attention, enable_gqa=True),
        ((2, 4, 17, 8), (2, 2, 17, 8), (2, 2, 17, 8), (2, 4, 17, 8)),
        True,
        "npu",
    ),
}
PRODUCTS = {
    "mm": Product(torch.mm, ((33, 65), (65, 29))),
    "mm of transposed tensors": Product(lambda a, b: torch.mm(a.t(), b.t()), ((65, 33), (29, 65))),
    "mm of slices": Product(lambda a, b: torch.mm(a[:, ::2], b[3:, ::3]), ((33, 130), (68, 87))),
    "mm of an expanded tensor": Product(lambda a, b: torch.mm(a.expand(33, 65), b), ((1, 65), (65, 29))),
    "mm into a given tensor": Product(strided_out, ((33, 65), (65, 29))),
    "mm into a tensor of no elements": Product(out_of_no_elements, ((33, 65), (65, 29))),
    "mm of no elements": Product(torch.mm, ((33, 0), (0, 29))),
    "addmm": Product(scaled, ((33, 29), (33, 65), (65, 29))),
    "addmm of a row": Product(scaled, ((29,), (33, 65), (65, 29))),
    "addmm in place": Product(in_place("addmm_"), ((33, 29), (33, 65), (65, 29))),
    "addmm into its argument": Product(out_that_is_an_argument, ((33, 29), (33, 65), (65, 29))),
    "bmm": Product(torch.bmm, ((3, 17, 65), (3, 65, 29))),
    "baddbmm": Product(functools.partial(torch.baddbmm, beta=0.3, alpha=0.7), ((3, 17, 29), (3, 17, 65), (3, 65, 29))),
    "baddbmm in place": Product(in_place("baddbmm_"), ((3, 17, 29), (3, 17, 65), (3, 65, 29))),
    "addbmm": Product(torch.addbmm, ((17, 29), (3, 17, 65), (3, 65, 29))),
    "mv": Product(torch.mv, ((33, 65), (65,))),
    "addmv": Product(functools.partial(torch.addmv, beta=0.3, alpha=0.7), ((33,), (33, 65), (65,))),
    "dot": Product(torch.dot, ((999,), (999,))),
    "matmul": Product(torch.matmul, ((2, 3, 17, 65), (65, 29))),
    "matmul while nothing is derived": Product(torch.inference_mode()(torch.matmul), ((2, 3, 17, 65), (65, 29))),
    "linear": Product(F.linear, ((5, 7, 65), (33, 65), (33,))),
    "einsum": Product(functools.partial(torch.einsum, "bij,bjk->bik"), ((3, 17, 65), (3, 65, 29))),
    "conv_tbc": Product(torch.conv_tbc, ((9, 2, 6), (3, 6, 4), (4,))),
    "LSTM": Product(functools.partial(recurrent, torch.nn.LSTM), ((5, 2, 8),)),
    "GRU": Product(functools.partial(recurrent, torch.nn.GRU), ((5, 2, 8),)),
    "MultiheadAttention": Product(multi_head_attention, ((3, 5, 8), (24, 8), (8, 8))),
    **{f"derivatives of {name}": product for name, product in gradients.items()},
}


def results(product: Product, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not product.has_derivative:
        return [product.function(*tensors)]
    *tensors, grad_output = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = product.function(*leaves)
    found = torch.autograd.grad(result, leaves, grad_output, allow_unused=True)
    return [result.detach(), *(gradient for gradient in found if gradient is not None)]


def is_rounded_once(product: Product, dtype: torch.dtype) -> bool:
    torch.manual_seed(1)
    tensors = [torch.randn(shape).to(dtype) for shape in product.shapes]
    found = results(product, [tensor.to("npu") for tensor in tensors])
    expected = results(product, [tensor.to(product.float32_of, torch.float32) for tensor in tensors])
    return len(found) == len(expected) and all(
        result.dtype == dtype and torch.equal(result.cpu(), wide.to(dtype).cpu())
        for result, wide in zip(found, expected, strict=True)
    )


def sum_of_product(dtype: torch.dtype) -> float:
    """Add a product to a number whose neighbours are 2 apart: it is 1 and a little, which 16 bits forget."""
    epsilon = torch.finfo(dtype).eps
    left = torch.tensor([[1.0, epsilon / 2]], dtype=dtype, device="npu")
    number = torch.full((1, 1), 2 / epsilon, dtype=dtype, device="npu")
    return (torch.addmm(number, left, torch.ones_like(left).t()) - number).item()


def attention_with_dropout(dtype: torch.dtype) -> bool:
    """Whether the same elements are dropped, and the generator ends in the same state, as in float32."""
    torch.manual_seed(1)
    tensors = [torch.randn(2, 3, 17, 8).to(dtype) for _ in range(4)]
    product = Product(functools.partial(F.scaled_dot_product_attention, dropout_p=0.5), (), True)
    found, states = [], []
    for computed in (dtype, torch.float32):
        torch.npu.manual_seed(3)
        found.append(results(product, [tensor.to("npu", computed) for tensor in tensors]))
        states.append(torch.npu.get_rng_state())
    return torch.equal(*states) and all(
        torch.equal(narrow, wide.to(dtype)) for narrow, wide in zip(*found, strict=True)
    )


def error_of_mixed_dtypes() -> str:
    try:
        torch.mm(torch.ones(2, 2, dtype=torch.float16, device="npu"), torch.ones(2, 2, device="npu"))
    except RuntimeError as error:
        return str(error)
    return ""


def is_as_on_the_cpu(dtype: torch.dtype) -> bool:
    left, right = (torch.arange(math.prod(shape)).view(shape).to(dtype) for shape in ((3, 4), (4, 5)))
    found, expected = torch.mm(left.to("npu"), right.to("npu")), torch.mm(left, right)
    return found.dtype == dtype and torch.equal(found.cpu(), expected)


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "rounded once": {
                    f"{name} {dtype}": is_rounded_once(product, DTYPES[dtype])
                    for name, product in PRODUCTS.items()
                    for dtype in DTYPES
                },
                "sum of product": [sum_of_product(dtype) for dtype in DTYPES.values()],
                "attention with dropout": [attention_with_dropout(dtype) for dtype in DTYPES.values()],
                "mixed dtypes": error_of_mixed_dtypes(),
                "other dtypes": [is_as_on_the_cpu(dtype) for dtype in (torch.float32, torch.float64, torch.int32)],
            }
        )
    )
