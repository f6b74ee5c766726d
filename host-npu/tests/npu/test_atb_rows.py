"""Row-wise operations of ATB: gating of experts, products, quantization and norms."""

from typing import Any

import pytest
import torch
import torch_npu
from tests._atb import DTYPES
from tests._values import assert_near, assert_quantized, moved, refused
from torch import Tensor


@pytest.mark.parametrize("n", [1, 2])
def test_scores_outside_the_largest_groups_become_zero(n):
    scores = torch.rand(5, 8, dtype=torch.float16)
    largest = scores.view(5, 4, 2).topk(n, -1).values.sum(-1).topk(2, -1).indices
    is_kept = torch.zeros(5, 4, dtype=torch.bool).scatter(1, largest, True).repeat_interleave(2, 1)
    on_npu = scores.npu()
    torch_npu._npu_group_topk(on_npu, k=2, group_num=4, n=n)
    torch.testing.assert_close(on_npu.cpu(), scores * is_kept, rtol=0, atol=0)


_EXPERTS: dict[str, Any] = {"group_num": 4, "group_topk": 2, "n": 2, "k": 3, "scale": 2.5}


@pytest.mark.parametrize("is_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_experts_are_chosen_by_scores_with_a_bias_and_weigh_by_those_without(dtype, is_norm):
    x, bias = torch.randn(5, 16).to(dtype), torch.rand(16).to(dtype)
    weights, experts = torch_npu.atb.npu_fused_add_topk_div(x.npu(), bias.npu(), **_EXPERTS, is_norm=is_norm)
    scores = x.double().sigmoid()
    groups = (scores + bias).view(5, 4, 4)
    kept = groups.topk(2, -1).values.sum(-1).topk(2, -1).indices
    is_kept = torch.zeros(5, 4, dtype=torch.bool).scatter(1, kept, True).unsqueeze(-1)
    chosen = (groups * is_kept).flatten(1).topk(3, -1).indices
    expected = scores.gather(1, chosen)
    assert torch.equal(experts.cpu(), chosen.int())
    assert_near(weights, expected / expected.sum(-1, keepdim=True) * 2.5 if is_norm else expected, units=4)


def test_of_equal_experts_the_first_are_chosen():
    x, bias = torch.zeros(1, 16).npu(), torch.zeros(16).npu()
    assert torch_npu.atb.npu_fused_add_topk_div(x, bias, **_EXPERTS)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_mapping": True}, "enable_expert_mapping is True; the host NPU takes False only"),
        ({"group_num": 3}, "group_num is 3 for 16 experts"),
        ({"group_topk": 5}, "group_topk is 5 instead of 1 to 4"),
        ({"n": 2**16 + 1}, "n is 65537 instead of 1 to 4"),
        ({"k": 17}, "k is 17 instead of 1 to 16"),
        ({"add_num": torch.zeros(16).half()}, r"add_num has dtype Half and shape \[16\] instead of Float and \[16\]"),
        ({"x": torch.zeros(5, 2, 16)}, r"x has shape \[5, 2, 16\] instead of \[tokens, experts\]"),
    ],
)
def test_a_choice_of_experts_that_does_not_fit_is_refused(options, message):
    arguments = {"x": torch.zeros(5, 16), "add_num": torch.zeros(16)} | _EXPERTS | options
    with refused(f"ATB's FusedAddTopkDiv: {message}"):
        torch_npu.atb.npu_fused_add_topk_div(**moved(arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_added_to_a_float32_gradient(dtype):
    x, weight, gradient = torch.randn(3, 6).to(dtype), torch.randn(3, 4).to(dtype), torch.randn(6, 4)
    on_npu = gradient.npu()
    torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), on_npu)
    torch.testing.assert_close(on_npu.cpu(), gradient + x.float().T @ weight.float())


@pytest.mark.parametrize("has_offset", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_quantized_by_their_scales(dtype, has_offset):
    x, scale = torch.randn(2, 5, 16).to(dtype), (torch.rand(5, 16) / 9 + 0.01).to(dtype)
    offset = torch.randint(-10, 10, (5, 16) if has_offset else (0,), dtype=torch.int8)
    y = torch.zeros(2, 5, 16, dtype=torch.int8).npu()
    torch_npu._npu_quantize_per_tensor(x.npu(), scale.npu(), offset.npu(), y)
    exact = x.double() / scale.double() + (offset if has_offset else 0)
    assert_quantized(y, exact)


def _norm_arguments(dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    return {
        "self": torch.randn(3, 2, 32).to(dtype),
        "gamma": torch.randn(1, 32).to(dtype),
        "beta": torch.randn(1, 32).to(dtype),
        "scale": torch.tensor([0.03]).to(dtype),
        "offset": torch.tensor([-7], dtype=torch.int8),
        "output": torch.zeros(3, 2, 32, dtype=torch.int8),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_normalized_and_quantized(dtype):
    x, gamma, beta, scale, offset, y = (each.npu() for each in _norm_arguments(dtype).values())
    torch_npu._npu_quant_rms_norm(x, gamma, beta, scale, offset, y, eps=0.1)
    normal = torch.nn.functional.rms_norm(x.cpu().double(), (32,), gamma[0].cpu().double(), 0.1)
    exact = (normal + beta.cpu()) / scale.cpu().double() + offset.cpu()
    assert_quantized(y, exact)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("self", torch.zeros(3, 2, 32), "self has dtype Float and shape .* ATB takes float16 or bfloat16"),
        ("self", torch.zeros(3, 2, 24).half(), "shape .*24.* rows of a multiple of 16 elements"),
        ("gamma", torch.zeros(3, 32).half(), r"gamma has .*\[3, 32\] instead of Half and \[32\]"),
        ("beta", torch.zeros(32).half(), r"beta has .*\[32\] instead of Half and \[1, 32\]"),
        ("scale", torch.ones(32).half(), r"scale has .*\[32\] instead of Half and \[1\]"),
        ("offset", torch.zeros(1).int(), r"offset has dtype Int .* instead of Char and \[1\]"),
        ("output", torch.zeros(6, 32).char(), r"output has .*\[6, 32\] instead of Char and \[3, 2, 32\]"),
    ],
)
def test_a_quantized_norm_of_wrong_arguments_is_refused(name, value, message):
    with refused(f"ATB's RmsNorm: .*{message}"):
        torch_npu._npu_quant_rms_norm(*(each.npu() for each in (_norm_arguments() | {name: value}).values()))
