"""scaled_dot_product_attention on the host NPU, with the kernel that torch_npu selects, compared with float64."""

import functools

import host_npu
import pytest
import torch
from tests._values import DTYPES, assert_near
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

_QUERIES, _KEYS = 6, 9
_KEPT = torch.arange(_KEYS) - torch.arange(_QUERIES)[:, None] < 3
_OF_BATCHES = torch.stack([_KEPT, _KEPT.flip(0)])[:, None]
_BIAS = torch.linspace(-2, 3, _QUERIES * _KEYS).view(1, 1, _QUERIES, _KEYS)


def _inputs(dtype, heads_of_keys=4, queries=_QUERIES, keys=_KEYS, size=16):
    shapes = (2, 4, queries, size), (2, heads_of_keys, keys, size), (2, heads_of_keys, keys, size)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _gradients(inputs, options, device, dtype=None):
    tensors = [each.to(device, dtype or each.dtype).requires_grad_() for each in inputs]
    given = {
        name: value.to(device, dtype if dtype and value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in options.items()
    }
    result = scaled_dot_product_attention(*tensors, **given)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(result.shape, generator=generator).to(inputs[0].dtype)
    return [result, *torch.autograd.grad(result, tensors, weight.to(result))]


def _check(inputs, **options):
    for actual, expected in zip(
        _gradients(inputs, options, "npu"), _gradients(inputs, options, "cpu", torch.float64), strict=True
    ):
        assert actual.dtype == inputs[0].dtype
        assert_near(actual, expected, units=2)


# Calls for which torch_npu has its own kernel.
_FUSED = {
    "no mask": {},
    "causal": {"is_causal": True},
    "a mask": {"attn_mask": _KEPT},
    "a mask of each batch": {"attn_mask": _OF_BATCHES},
    "a scale": {"scale": 0.3},
}
_OF_KEYS = torch.arange(_KEYS).expand(2, 1, 1, -1) < 7
if torch.__version__ >= (2, 10):
    _FUSED["a mask of keys"] = {"attn_mask": _OF_KEYS}


@DTYPES
@pytest.mark.parametrize("options", _FUSED.values(), ids=_FUSED)
def test_results_and_gradients_of_the_fused_kernel_are_those_of_float64(options, dtype):
    host_npu.reset()
    _check(_inputs(dtype), **options)
    launches = host_npu.stats().launches
    assert launches["aclnnFlashAttentionScore"] == launches["aclnnFlashAttentionScoreGrad"] == 1


@pytest.mark.skipif(torch.__version__ >= (2, 10), reason="torch_npu expands the mask")
def test_torch_npu_2_9_passes_on_a_mask_of_keys_which_cann_refuses():
    with pytest.raises(RuntimeError, match=r"attenMask has shape \[2, 1, 1, 9\] instead of \[\.\.\., 6, 9\]"):
        scaled_dot_product_attention(*(each.npu() for each in _inputs(torch.float16)), attn_mask=_OF_KEYS.npu())


@DTYPES
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["no mask", "causal"])
def test_groups_of_heads_share_keys_and_values(options, dtype):
    _check(_inputs(dtype, heads_of_keys=2), enable_gqa=True, **options)


# More queries, keys and heads than a block of scores holds.
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (200, 70), (70, 700), (2, 3000)])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_are_computed_in_blocks(queries, keys, causal):
    _check(_inputs(torch.float32, queries=queries, keys=keys), is_causal=causal)


# Other calls use PyTorch's operators, as on a device.
@DTYPES
@pytest.mark.parametrize("size", [16, 520])
def test_other_calls_are_composed_of_pytorchs_operators(size, dtype):
    host_npu.reset()
    _check(_inputs(dtype, size=size), attn_mask=_BIAS.to(dtype))
    assert not host_npu.stats().launches["aclnnFlashAttentionScore"]


def test_heads_of_more_than_512_numbers_have_no_fused_kernel():
    host_npu.reset()
    _check(_inputs(torch.float32, size=520))
    assert not host_npu.stats().launches["aclnnFlashAttentionScore"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_learned_bias_has_the_gradient_of_float64(dtype):
    inputs = _inputs(dtype)

    def gradient(device, wide):
        bias = _BIAS.to(device, wide).requires_grad_()
        result = scaled_dot_product_attention(*(each.to(device, wide) for each in inputs), attn_mask=bias)
        return torch.autograd.grad(result.sin().sum(), bias)[0].cpu().double()

    expected = gradient("cpu", torch.float64)
    assert_near(gradient("npu", dtype), expected, units=4, dtype=dtype)


def test_a_query_that_attends_to_nothing_has_the_result_0_and_no_gradient():
    inputs = [each.npu().requires_grad_() for each in _inputs(torch.float32)]
    kept = torch.ones(_QUERIES, _KEYS, dtype=torch.bool)
    kept[2] = False
    result = scaled_dot_product_attention(*inputs, attn_mask=kept.npu())
    result.sum().backward()
    assert result[:, :, 2].eq(0).all() and inputs[0].grad[:, :, 2].eq(0).all()
    assert all(each.grad.isfinite().all() for each in inputs)


@pytest.mark.parametrize("keep", [False, True], ids=["scores that are left out", "other scores"])
def test_nan_among_the_scores_comes_through_only_where_they_are_kept(keep):
    query, key, value = _inputs(torch.float32)
    key[:, :, -1] = torch.nan
    kept = torch.ones(_QUERIES, _KEYS, dtype=torch.bool)
    kept[:, -1] = keep
    result = scaled_dot_product_attention(query.npu(), key.npu(), value.npu(), attn_mask=kept.npu())
    assert result.isnan().all() == keep and result.isnan().any() == keep


def test_dropout_leaves_out_weights_and_scales_the_others():
    query, key, _ = _inputs(torch.float32, queries=200, keys=64, size=64)
    value = torch.eye(64).expand(2, 4, -1, -1).contiguous()
    tensors = [each.npu() for each in (query, key, value)]
    weights = scaled_dot_product_attention(*tensors).cpu()
    found = scaled_dot_product_attention(*tensors, dropout_p=0.25).cpu()
    is_kept = found.ne(0)
    assert is_kept.double().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(found, weights * is_kept / 0.75)


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch_npu 2.9 chooses as PyTorch does")
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.OVERRIDEABLE], ids=str)
def test_torch_npu_has_one_choice_whatever_backend_is_asked_for(backend):
    tensors = [each.npu() for each in _inputs(torch.float32)]
    host_npu.reset()
    with sdpa_kernel(backend):
        scaled_dot_product_attention(*tensors)
        chosen = torch._fused_sdp_choice(*tensors)
    torch.npu.synchronize()
    assert host_npu.stats().launches["aclnnFlashAttentionScore"] == 1
    assert chosen == SDPBackend.OVERRIDEABLE.value


def test_attention_can_be_traced_by_a_compiler():
    def attend(x):
        return scaled_dot_product_attention(x, x, x, is_causal=True).square().sum()

    x = _inputs(torch.float32)[0].npu().requires_grad_()
    compiled = torch.compile(attend, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x), x)
    (expected,) = torch.autograd.grad(attend(x), x)
    torch.testing.assert_close(found, expected)


def test_inference_has_the_same_results():
    tensors = [each.npu() for each in _inputs(torch.float32)]
    attend = functools.partial(scaled_dot_product_attention, is_causal=True)
    with torch.inference_mode():
        found = attend(*tensors)
    assert torch.equal(found, attend(*tensors))
