"""linear_cross_entropy: mixed dtypes, infinite factors, nested derivatives and other edges."""

import re
from functools import partial

from torch_aclnn_ops import functional as ours

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional


def _tensors(dtype=torch.float32, rows=6):
    torch.manual_seed(0)
    input, head = (torch.randn(size, 4, dtype=dtype, requires_grad=True) for size in (rows, 9))
    return input, head, torch.arange(rows) % 9


@pytest.mark.parametrize("name", ["predicted_tokens", "token_accuracy"])
def test_predicted_tokens_are_supported_in_forward_mode(name):
    input, head, target = _tensors()

    def tangent(outputs):
        def loss(x):
            result = ours.linear_cross_entropy(x, head.detach(), target, outputs=outputs)
            return result.loss if outputs else result

        return torch.func.jvp(loss, (input.detach(),), (torch.ones_like(input),))[1]

    torch.testing.assert_close(tangent((name,)), tangent(()))


def test_an_ignored_row_has_no_class_weight():
    input, head, _ = _tensors()
    target, weight = torch.tensor([1, 2, 8, -100, 3, 4]), torch.ones(9)
    weight[0] = torch.inf  # like inverse frequencies, for a class that does not occur
    torch.testing.assert_close(
        ours.linear_cross_entropy(input, head, target, weight=weight),
        functional.cross_entropy(input @ head.T, target, weight=weight),
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_of_a_compiled_call_raises(reduction):
    input, head, target = _tensors()
    compiled = torch.compile(
        lambda x, w: ours.linear_cross_entropy(x, w, target, reduction=reduction).sum(), backend="eager", fullgraph=True
    )
    with pytest.raises(RuntimeError, match="outside of torch.compile"):
        torch.autograd.grad(compiled(input, head), head, create_graph=True)
    torch.autograd.grad(compiled(input, head), head)


# A float32 weight of classes or rows with 16-bit rows.
_INDICES, _SOFT = torch.tensor([1, -100, 0, 8, 3, 3]), torch.rand(6, 9).softmax(1)
FLOAT32_WEIGHTS = {
    "class weight": ("weight", _INDICES, {}),
    "class weight, smoothed": ("weight", _INDICES, {"label_smoothing": 0.1}),
    "class weight of probabilities": ("weight", _SOFT, {}),
    "token weight": ("token_weight", _INDICES, {}),
}
float32_weights = pytest.mark.parametrize("kind", FLOAT32_WEIGHTS)


def _call(kind, x, w, weight, **more):
    name, target, options = FLOAT32_WEIGHTS[kind]
    given = {name: weight if name == "weight" else weight[:6], **options, **more}
    return ours.linear_cross_entropy(x, w, target, **given)


def _loss_and_gradients(call, input, head, weight, **more):
    loss = call(input, head, weight, **more)
    return loss.detach(), *torch.autograd.grad(loss.sum(), (input, head))


@float32_weights
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_class_weights_are_supported_for_16_bit_rows(kind, reduction, dtype):
    (input, head, _), weight, call = _tensors(dtype), torch.rand(9), partial(_call, kind)
    results = _loss_and_gradients(call, input, head, weight, reduction=reduction)
    wide = [tensor.detach().double().requires_grad_() for tensor in (input, head)]
    expected = _loss_and_gradients(call, *wide, weight.double(), reduction=reduction)
    assert results[0].dtype == torch.float32 and results[1].dtype == dtype
    for result, truth in zip(results, expected, strict=True):
        eps = torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.double(), truth, rtol=4 * eps, atol=4 * eps * float(truth.abs().max()))


@float32_weights
def test_float32_class_weights_are_supported_for_16_bit_rows_compiled_and_in_every_derivative(kind):
    (input, head, _), weight, call = _tensors(torch.bfloat16), torch.rand(9), partial(_call, kind)
    compiled = torch.compile(lambda *args: call(*args), backend="aot_eager", fullgraph=True)
    call = partial(call, chunk_size=6)  # like compiled code, which has no case for few logits
    expected = _loss_and_gradients(call, input, head, weight)
    torch.testing.assert_close(_loss_and_gradients(compiled, input, head, weight), expected)
    tangent = torch.ones_like(head.detach())
    _, pushed = torch.func.jvp(lambda w: call(input.detach(), w, weight), (head.detach(),), (tangent,))
    torch.testing.assert_close(pushed, expected[2].float().sum(), rtol=2e-2, atol=2e-2)
    gradient = torch.autograd.grad(call(input, head, weight), head, create_graph=True)[0]
    assert torch.autograd.grad(gradient.float().square().sum(), input)[0].isfinite().all()


@pytest.mark.parametrize("target", [[0, 1, -100], [0, 1, 2]], ids=["a row is ignored", "no row is ignored"])
def test_targets_and_class_weights_made_in_inference_mode_are_supported(target):
    with torch.inference_mode():
        given = torch.tensor(target), torch.rand(5)
    gradients = []
    for target, weight in (given, [one.clone() for one in given]):
        input = torch.arange(12.0).reshape(3, 4).requires_grad_()
        ours.linear_cross_entropy(input, torch.eye(5, 4), target, weight=weight).backward()
        gradients.append(input.grad)
    torch.testing.assert_close(*gradients)


def test_a_head_of_another_dtype_is_cast_by_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours.linear_cross_entropy(torch.ones(3, 4), torch.ones(5, 4, dtype=torch.bfloat16), torch.arange(3))
    assert loss.isfinite()


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_out_of_range_is_refused_with_the_range(index):
    sentence = f"Target {index} is out of bounds. linear_cross_entropy: target must be from 0 to 4, or ignore_index"
    with pytest.raises(IndexError, match=f"^{re.escape(sentence)}, which is -100"):
        ours.linear_cross_entropy(torch.ones(3, 4), torch.ones(5, 4), torch.tensor([0, index, 1]))


def test_rows_of_no_features_have_the_logits_of_the_bias():
    bias, target = torch.randn(5), torch.arange(4).reshape(2, 2)
    loss = ours.linear_cross_entropy(torch.ones(2, 2, 0), torch.ones(5, 0), target, linear_bias=bias)
    torch.testing.assert_close(loss, functional.cross_entropy(bias.expand(4, 5), target.flatten()))


def test_a_trace_of_few_logits_is_that_of_other_targets_too():
    input, head = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    traced = make_fx(lambda target: ours.linear_cross_entropy(input, head, target))(torch.arange(4))
    target = torch.tensor([1, -100, 4, 0])
    torch.testing.assert_close(traced(target), ours.linear_cross_entropy(input, head, target))


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 3.0}, {"reduction": "none", "lse_square_scale": 0.1}, {"max_memory": 10_000}],
    ids=str,
)
def test_a_graph_of_symbolic_sizes_computes_other_numbers_of_rows(options):
    def gradients(input, head, target):
        return torch.autograd.grad(ours.linear_cross_entropy(input, head, target, **options).sum(), (input, head))

    graph = make_fx(gradients, tracing_mode="symbolic")(*_tensors())
    for rows in (6, 11):
        torch.testing.assert_close(graph(*_tensors(rows=rows)), gradients(*_tensors(rows=rows)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_aot_function_with_dynamic_sizes_has_the_eager_gradients(reduction):
    def loss(input, head, target):
        return ours.linear_cross_entropy(input, head, target, softcap=3.0, reduction=reduction).sum()

    traced = aot_function(loss, fw_compiler=nop, dynamic=True)
    input, head, target = _tensors()
    expected = torch.autograd.grad(loss(input, head, target), (input, head))
    torch.testing.assert_close(torch.autograd.grad(traced(input, head, target), (input, head)), expected)
