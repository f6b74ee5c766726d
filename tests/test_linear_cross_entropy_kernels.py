"""linear_cross_entropy: its computation and memory, its chunks, and its operators for compiled code."""

import math
from functools import partial

from torch_aclnn_ops import explain
from torch_aclnn_ops import functional as ours
from torch_aclnn_ops.functional.linear_cross_entropy.statistics import LOSS, statistics
from torch_aclnn_ops.ops import _chunks
from torch_aclnn_ops.ops._tiling import Sizes, tile_rows
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call, Coefficients

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests._contract import Maker

N, H, C = 6, 3, 7


class _Products(TorchDispatchMode):
    """Counts the multiplications of matrix products, in units of the rows' logits."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.total += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))

    @property
    def number(self):
        return self.total / self.unit


def _tensors(dtype=torch.float64, trained=(True, True)):
    make = Maker(dtype)
    input, head = make.normal(N, H).requires_grad_(trained[0]), make.normal(C, H).requires_grad_(trained[1])
    return input, head, make.index(C, N)


def _divergence(input, head, target, **options):
    return ours.linear_kl_div(input, head, input.detach(), head.detach().flip(0), target=target, **options)


# The trained tensors, the reduction, and the products of a cross entropy and of a divergence, which adds the teacher's.
PRODUCTS = [
    ((True, True), "mean", 3, 4),
    ((True, True), "none", 4, 6),
    ((True, False), "sum", 2, 3),
    ((False, True), "mean", 2, 3),
    ((False, True), "none", 3, 5),
    ((False, False), "mean", 1, 2),
]


@pytest.mark.parametrize("loss", [ours.linear_cross_entropy, _divergence])
@pytest.mark.parametrize(("trained", "reduction", "of_cross_entropy", "of_divergence"), PRODUCTS)
def test_no_matrix_product_is_computed_for_a_frozen_argument_or_twice_for_a_scalar_loss(
    loss, trained, reduction, of_cross_entropy, of_divergence
):
    input, head, target = _tensors(trained=trained)
    with _Products(N * H * C) as mode:
        value = loss(input, head, target, reduction=reduction).sum()
        if value.requires_grad:
            value.backward()
    assert mode.number == (of_divergence if loss is _divergence else of_cross_entropy)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_skipped(reduction):
    input, head, target = _tensors()
    target[: N // 2] = -100
    with _Products(N * H * C) as mode:
        ours.linear_cross_entropy(input, head, target, reduction=reduction).sum().backward()
    assert mode.number == (3 if reduction == "mean" else 4) / 2
    assert not input.grad[: N // 2].any() and input.grad[N // 2 :].all()


def test_accumulated_gradients_of_a_retained_graph_are_the_sum():
    # The first backward passes its tensors to .grad, to which the second adds.
    input, head, target = _tensors()
    loss = ours.linear_cross_entropy(input, head, target)
    loss.backward(retain_graph=True)
    first = input.grad.clone(), head.grad.clone()
    loss.backward()
    torch.testing.assert_close((input.grad, head.grad), (2 * first[0], 2 * first[1]))


def test_a_gradient_is_unchanged_after_one_with_create_graph():
    input, head, target = _tensors()
    loss = ours.linear_cross_entropy(input, head, target) * 3
    with_graph = torch.autograd.grad(loss, (input, head), create_graph=True)
    assert all(gradient.requires_grad for gradient in with_graph)
    torch.testing.assert_close(torch.autograd.grad(loss, (input, head)), with_graph)


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("loss", [ours.linear_cross_entropy, _divergence])
def test_a_tangent_of_the_losss_factor_reaches_the_gradients(loss, factor):
    input, head, target = _tensors()
    expected = torch.autograd.grad(loss(input, head, target), (input, head))
    with forward_ad.dual_level():
        made = loss(input, head, target)
        scale = forward_ad.make_dual(made.new_tensor(factor), made.new_tensor(3.0))
        for found, gradient in zip(torch.autograd.grad(made * scale, (input, head)), expected, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, 3 * gradient)


def test_a_tangent_of_the_gradients_of_rows_reaches_the_gradients():
    input, head, target = _tensors()
    losses = ours.linear_cross_entropy(input, head, target, reduction="none")
    grad, tangent = torch.rand(2, N, dtype=torch.float64)
    expected = torch.autograd.grad(losses, (input, head), tangent, retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad, tangent)
        for found, gradient in zip(torch.autograd.grad(losses, (input, head), dual), expected, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, gradient)


def test_the_gradient_of_an_upcast_input_is_not_rounded():
    # Ranks that share a vocabulary sum such gradients.
    input, head, target = _tensors(torch.float16)
    wide = input.detach().float().requires_grad_()
    call = Call(wide, head, None, target, gradients=(True, True, False))
    of_input, of_head = torch.autograd.grad(statistics(call).log_sum_exp.sum(), (wide, head))
    assert of_head.dtype == torch.float16 and not torch.equal(of_input, of_input.half().float())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_loss_has_the_same_gradients(use_reentrant):
    input, head, target = _tensors()
    expected = torch.autograd.grad(ours.linear_cross_entropy(input, head, target), (input, head))
    loss = checkpoint(ours.linear_cross_entropy, input, head, target, use_reentrant=use_reentrant)
    loss.backward()
    torch.testing.assert_close((input.grad, head.grad), expected)


def test_a_gradient_scaler_keeps_float16_gradients_from_underflow():
    rows = 4096
    make = Maker(torch.float16)
    input, head, target = make.normal(rows, H).requires_grad_(), make.normal(C, H).requires_grad_(), make.index(C, rows)
    scale = 2.0**16
    (ours.linear_cross_entropy(input, head, target) * 1e-4 * scale).backward()
    leaf = input.detach().double().requires_grad_()
    (torch.nn.functional.cross_entropy(leaf @ head.double().T, target) * 1e-4).backward()
    error = (input.grad.double() / scale - leaf.grad).abs().max()
    assert error < leaf.grad.abs().max() * 2**-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", ["nothing", "input", "linear_weight", "target"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_max_memory_may_be_what_the_error_names_and_less_raises_before_any_product(rows, trained, reduction, dtype):
    tensors = {"input": torch.randn(rows, 16), "linear_weight": torch.randn(300, 16), "target": torch.rand(rows, 300)}
    given = {name: one.to(dtype).requires_grad_(name == trained) for name, one in tensors.items()}
    call = partial(ours.linear_cross_entropy, **given, reduction=reduction)
    with pytest.raises(ValueError, match="^linear_cross_entropy: max_memory must be at least") as refused:
        call(max_memory=1)
    least = int(str(refused.value).partition("at least ")[2].partition(" ")[0])
    for attempt in (call, partial(explain, call)):
        with _Products(1) as products, pytest.raises(ValueError, match=f"must be at least {least} bytes"):
            attempt(max_memory=least - 1)
        assert products.total == 0
    torch.testing.assert_close(call(max_memory=least), call(), equal_nan=True)


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("rows", [40, 9 * 64])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bfloat16_is_as_exact_with_native_instructions_as_without(monkeypatch, units, rows, reduction):
    monkeypatch.setattr(_chunks, "chip_has_bfloat16_units", lambda: units)
    make = Maker(torch.bfloat16)
    input, head = make.normal(rows, 64).requires_grad_(), make.normal(300, 64).requires_grad_()
    target = make.index(300, rows)
    wide = [tensor.detach().double().requires_grad_() for tensor in (input, head)]
    truth = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, target, reduction=reduction)
    loss = ours.linear_cross_entropy(input, head, target, reduction=reduction)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(loss.mean(), (input, head))
    for gradient, exact in zip(gradients, torch.autograd.grad(truth.mean(), wide), strict=True):
        assert (gradient.double() - exact).abs().max() < exact.abs().max() * 2**-7


def _call(dtype=torch.float64, **fields):
    input, head, target = _tensors(dtype)
    target[0] = -1
    return Call(input, head, **{"linear_bias": None, "target": target, "chunk_size": 4, **fields})


PROBLEMS = {
    "plain": {},
    "bias": {"linear_bias": torch.linspace(-1, 1, C, dtype=torch.float64)},
    "softcap": {"softcap": 2.0, "temperature": 0.5, "chunk_size": None},
    "entropy": {"entropy": True},
    "probabilities": {"target": torch.rand(N, C, dtype=torch.float64).softmax(1)},
}


@pytest.mark.parametrize("fields", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.every_nth_case(3)
def test_the_operator_passes_opcheck(fields, weighted):
    ones = torch.ones(N, dtype=torch.float64)
    factors = Coefficients(ones, ones, ones if weighted else None, None)
    call = _call(**fields)._replace(weighted=weighted, predicted_tokens=True, gradients=(True, True, False))
    call = LOSS.flatten(call)
    for given in (factors, (None,) * len(factors)):
        torch.library.opcheck(torch.ops.torch_aclnn_ops.linear_cross_entropy.default, (*call, *given))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.every_nth_case(3)
def test_compiled_code_calls_the_kernels_as_one_operator(dynamic, reduction):
    backend = EagerAndRecordGraphs()
    loss_of = partial(ours.linear_cross_entropy, reduction=reduction)
    call = torch.compile(loss_of, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (5, 9, 17):
        input, head = torch.randn(rows, H, requires_grad=True), torch.randn(C, H, requires_grad=True)
        target = torch.randint(C, (rows,))
        torch.testing.assert_close(call(input, head, target), loss_of(input, head, target))
    assert len(backend.graphs) == 1 or not dynamic
    names = [str(node.target) for node in backend.graphs[-1].graph.nodes]
    assert sum("linear_cross_entropy" in name for name in names) == 1


def test_export_supports_a_dynamic_number_of_rows():
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Parameter(torch.randn(C, H))

        def forward(self, input, target):
            return ours.linear_cross_entropy(input, self.head, target)

    module, rows = Loss(), torch.export.Dim("rows", min=2)
    arguments = torch.randn(4, H), torch.randint(C, (4,))
    with torch.no_grad():
        program = torch.export.export(module, arguments, dynamic_shapes=({0: rows}, {0: rows}))
    input, target = torch.randn(11, H), torch.randint(C, (11,))
    torch.testing.assert_close(program.module()(input, target), module(input, target).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7, 100, 5000])
@pytest.mark.parametrize("classes", [1, 50, 200_000])
@pytest.mark.parametrize("features", [64, 1250])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_tiling_covers_all_rows_within_max_memory(dtype, rows, classes, features, copies):
    sizes = Sizes(rows, classes, features, dtype, True)
    for options in ({}, {"chunk_size": 3}, {"max_memory": 2**31}):
        tile = partial(tile_rows, "linear_cross_entropy", sizes, copies=copies, **options)
        tilings = [tile(with_gradient=True, units=units) for units in (False, dtype == torch.bfloat16)]
        for tiling in (*tilings, tile()):
            assert [row for chunk in tiling.chunks() for row in range(chunk.start, chunk.stop)] == list(range(rows))
            assert tiling.bytes_held <= options.get("max_memory", math.inf)


@pytest.mark.parametrize(
    ("features", "options", "rows_per_chunk", "held"),
    [
        (1024, {}, 512, 0),  # 512 rows of float32 logits have the size of the gradient
        (1000, {}, 456, 0),  # 496 in multiples of 8 fit, in five chunks of one size
        (1024, {"chunk_size": 512}, 512, 0),
        (1024, {"chunk_size": 513}, 513, 513),
    ],
)
def test_logits_reuse_the_memory_of_the_heads_gradient(features, options, rows_per_chunk, held):
    rows, classes = 2048 if features == 1024 else 2250, 30_000
    sizes = Sizes(rows, classes, features, torch.bfloat16, True)
    others = rows * classes * 2 + min(2**22 // (features * 4), classes) * features * 4
    tiling = tile_rows("linear_cross_entropy", sizes, **options, with_gradient=True, units=True)
    assert tiling.keeps_gradients
    assert (tiling.rows_per_chunk, tiling.bytes_held) == (rows_per_chunk, others + held * classes * 4)
