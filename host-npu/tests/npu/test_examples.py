"""The example models of torch_npu's fused operators, and transformers' attention for NPUs."""

import importlib.util
from pathlib import Path

import pytest
import torch

_EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(name):
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["llama_block", "moe_block"])
@pytest.mark.parametrize(("dtype", "difference"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_fused_operators_train_as_plain_ones_do_on_the_cpu(name, dtype, difference):
    example = _example(name)
    fused, plain = (example.train(device, dtype, 6) for device in ("npu", "cpu"))
    assert fused == pytest.approx(plain, rel=difference, abs=difference)
    assert fused[-1] < 0.95 * fused[0]


@pytest.mark.parametrize("lengths", [None, [3, 9]], ids=["a batch", "packed sequences"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_the_attention_of_transformers_for_npus_equals_that_of_the_cpu(lengths, causal):
    attention = pytest.importorskip("transformers.integrations.npu_flash_attention")
    sizes = lengths or [12]
    on_cpu = [torch.randn(sum(sizes), 2, 8).requires_grad_() for _ in range(3)]
    on_npu = [each.detach().npu().requires_grad_() for each in on_cpu]
    if lengths is None:
        result = attention.npu_flash_attn_func(*(each[None] for each in on_npu), causal=causal)[0]
    else:
        ends = torch.tensor([0, *lengths]).cumsum(0).int().npu()
        result = attention.npu_flash_attn_varlen_func(*on_npu, ends, ends, causal=causal)
    parts = zip(*(each.transpose(0, 1).split(sizes, 1) for each in on_cpu), strict=True)
    expected = torch.cat(
        [torch.nn.functional.scaled_dot_product_attention(*each, is_causal=causal) for each in parts], 1
    ).transpose(0, 1)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(expected.shape)
    result.backward(weight.npu())
    expected.backward(weight)
    for actual, wanted in zip(on_npu, on_cpu, strict=True):
        torch.testing.assert_close(actual.grad.cpu(), wanted.grad, rtol=1e-5, atol=1e-5)
