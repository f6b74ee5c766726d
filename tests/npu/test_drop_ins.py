"""The drop-in functions, modules and the optimizer on an NPU: the CPU's results, computed by CANN's operators."""

from functools import partial

import torch_aclnn_ops
from torch_aclnn_ops import functional as ours
from torch_aclnn_ops import ops

import pytest
import torch

from tests import test_ema_adam
from tests._contract import HALF_DTYPES, Case, DropInContract, Maker, tables_of
from tests.npu._operators import CHUNKED, checked_values, counted_launches, linear_case

GRADIENTS = "aclnnFusedLinearCrossEntropyLossGrad"
CANNS_LOSS = "aclnnFusedCrossEntropyLossWithMaxSum"
CASES = [
    pytest.param(case, id=f"{table.__module__.removeprefix('tests.test_')}-{table.__name__}-{case.name}")
    for table in tables_of(DropInContract)
    for case in table.CASES
]


def _loss_and_gradients(case: Case, dtype: torch.dtype, device: str, compiled=lambda call: call):
    make = Maker(dtype)
    inputs = tuple(tensor.to(device).requires_grad_() for tensor in case.inputs(make))
    constants = tuple(tensor.to(device) for tensor in case.constants(make))
    result = compiled(partial(case.call, ours))(*inputs, *constants)
    cotangent = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
    gradients = torch.autograd.grad(result, inputs, cotangent.to(result.dtype).to(device))
    assert all(tensor.device.type == device for tensor in (result, *gradients))
    return [tensor.detach().cpu() for tensor in (result, *gradients)]


# Every case runs on a CPU; fused operators and all kinds of fallbacks are tested below.
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.every_nth_case(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_are_the_cpus(case, dtype):
    tolerance = 32 * torch.finfo(dtype).eps
    found, expected = (_loss_and_gradients(case, dtype, device) for device in ("npu", "cpu"))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.every_nth_case(48)
@pytest.mark.parametrize("case", CASES)
def test_compiled_code_launches_what_eager_code_launches(case):
    def compiled(call):
        torch._dynamo.reset()
        return torch.compile(call, fullgraph=True, backend="aot_eager")

    found = []
    for how in (compiled, lambda call: call):
        before = torch_aclnn_ops.launches()
        results = _loss_and_gradients(case, torch.float32, "npu", how)
        found.append((results, {name: n - before[name] for name, n in torch_aclnn_ops.launches().items()}))
    (mine, launched), (expected, launched_eagerly) = found
    assert launched == launched_eagerly
    torch.testing.assert_close(mine, expected, equal_nan=True)


FUSED = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "z-loss": {"lse_square_scale": 0.01},
    "z-loss, none": {"lse_square_scale": 0.01, "reduction": "none"},
    "log-probabilities": {"outputs": ("log_probabilities",)},
    "weights of rows": {"token_weight": torch.linspace(0.1, 1, 24)},
    "weights of rows, negative": {"token_weight": torch.linspace(-1, 1, 24)},
    "class weights in float32": {"weight": torch.linspace(0.1, 1, 160)},
    # Includes a weight of 0, whose row has only the gradient of the z-loss.
    "class weights in 16 bits": {"weight": lambda dtype: torch.linspace(0, 1, 160, dtype=dtype)},
}


def _on(device, value, dtype=None):
    value = value(dtype) if callable(value) else value
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("options", FUSED.values(), ids=FUSED)
def test_the_fused_operators_give_the_cpus_loss_and_gradients(options, dtype):
    input, weight, target = linear_case(dtype)
    target[5] = 0
    found = []
    for device in ("cpu", "npu"):
        tensors = [tensor.to(device).requires_grad_() for tensor in (input, weight)]
        moved = {name: _on(device, value, dtype) for name, value in options.items()}
        with counted_launches() as launches:
            result = ours.linear_cross_entropy(*tensors, target.to(device), **moved)
            if "outputs" in options:
                result = result.loss + result.log_probabilities.square().sum()
            gradients = torch.autograd.grad(result.sum(), tensors)
        found.append([tensor.detach().cpu() for tensor in (result, *gradients)])
    assert [launches[name] for name in ("aclnnFusedLinearOnlineMaxSum", CANNS_LOSS, GRADIENTS)] == [1, 1, 1]
    tolerance = 8 * torch.finfo(dtype).eps  # CANN rounds the logits to 16 bits
    (expected, *expected_gradients), (loss, *gradients) = found
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())
    assert not gradients[0][3].any() and (loss.dim() == 0 or loss[3] == 0)  # the ignored row


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["fused", "chunked"])
def test_a_compiled_linear_cross_entropy_uses_the_same_operators(options):
    input, weight, target = linear_case(torch.bfloat16)
    results, call = [], partial(ours.linear_cross_entropy, **options)
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        leaves = [tensor.npu().requires_grad_() for tensor in (input, weight)]
        with counted_launches() as launches:
            loss = function(*leaves, target.npu())
            results.append([tensor.cpu() for tensor in (loss, *torch.autograd.grad(loss, leaves))])
        assert launches[GRADIENTS] == (not options)
    tolerance = 8 * torch.finfo(torch.bfloat16).eps
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize("reason", CHUNKED)
def test_explain_shows_why_the_fused_operators_are_not_used(reason):
    hidden, head, target = (tensor.npu() for tensor in linear_case(torch.bfloat16))
    options = {name: _on("npu", value) for name, value in CHUNKED[reason].items()}
    tensors = hidden.requires_grad_(), head.requires_grad_(), target
    lines = torch_aclnn_ops.explain(ours.linear_cross_entropy, *tensors, **options)
    assert lines.startswith(f"linear_cross_entropy: PyTorch fallback, because {reason}; ")


def _halves(rows, classes, features):
    shapes = (rows, features), (classes, features)
    return *(torch.zeros(shape, dtype=torch.half) for shape in shapes), torch.zeros(rows, dtype=torch.int64)


_OF_A_HEAD = "linear_cross_entropy: PyTorch fallback, because"
FORMULAS = {
    "float64": (
        lambda: (ours.mse_loss, torch.rand(3).double(), torch.rand(3).double()),
        "mse_loss: PyTorch fallback, because input is torch.float64, which CANN's operator does not support on"
        " Ascend910B\nmse_loss_backward: PyTorch fallback, because grad_output is torch.float64, which CANN's"
        " operator does not support on Ascend910B",
    ),
    "nine dimensions": (
        lambda: (ours.binary_cross_entropy, torch.rand((1,) * 9), torch.rand((1,) * 9)),
        "binary_cross_entropy: PyTorch fallback, because input has 9 dimensions and CANN's operators support at most"
        " 8\nbinary_cross_entropy_backward: PyTorch fallback, because self has 9 dimensions and CANN's operators"
        " support at most 8",
    ),
    "float32 matrices": (
        lambda: (ours.linear_cross_entropy, torch.rand(4, 2), torch.rand(200, 2), torch.zeros(4, dtype=torch.int64)),
        f"{_OF_A_HEAD} input is torch.float32 and CANN's operator supports torch.float16 and torch.bfloat16",
    ),
    "few classes": (
        lambda: (ours.linear_cross_entropy, *_halves(4, 127, 2)),
        f"{_OF_A_HEAD} weight has 127 classes and CANN's operator supports 128 or more",
    ),
    "many features": (
        lambda: (ours.linear_cross_entropy, *_halves(1, 128, 65535)),
        f"{_OF_A_HEAD} weight has 65535 features and CANN's operator supports at most 65534",
    ),
    "many classes": (
        lambda: (ours.linear_cross_entropy, *_halves(1, 2**24 + 1, 1)),
        f"{_OF_A_HEAD} weight has 16777217 classes and CANN's operator supports at most 16777216",
    ),
    "integers": (
        lambda: (ours.embedding, torch.zeros(3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)),
        "embedding: native PyTorch kernel, because the drop-in leaves such arguments to torch",
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_unsupported_inputs_fall_back_to_pytorch_and_are_explained(name):
    make, sentence = FORMULAS[name]
    function, *arguments = make()
    on_npu = [arg.npu().requires_grad_(arg.is_floating_point()) for arg in arguments]
    assert torch_aclnn_ops.explain(function, *on_npu).startswith(sentence)


def test_the_fallback_raises_like_the_operator():
    with pytest.raises(ValueError, match=r"mse_loss_backward: reduction must be 0 \(none\), .* but it is 7"):
        ops.mse_loss_backward(*[torch.rand(3).double().npu()] * 3, 7)
    state = {name: torch.rand(3).double().npu() for name in ("grad", *test_ema_adam.STATE)}
    state["var"].requires_grad_()
    with pytest.raises(RuntimeError, match="apply_fused_ema_adam_: var must not require grad"):
        ops.apply_fused_ema_adam_(**state, step=torch.tensor([1]).npu(), **test_ema_adam.OPTIONS)


@pytest.mark.skipif(torch.npu.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    "call",
    [
        lambda one, other: ours.mse_loss(one, other),
        lambda one, other: ours.binary_cross_entropy(one, other),
        lambda one, other: ours.embedding(other.long(), one.unsqueeze(1)),
        lambda one, other: ours.linear_cross_entropy(one.unsqueeze(1), one.unsqueeze(1), other.long()),
    ],
    ids=["mse_loss", "binary_cross_entropy", "embedding", "linear_cross_entropy"],
)
def test_tensors_on_two_npus_raise(call):
    with pytest.raises(RuntimeError, match=r"must be on npu:\d, as \w+ is, but it is on npu:\d"):
        call(torch.zeros(2, device="npu:0"), torch.zeros(2, device="npu:1"))


def _small_step(target, device, reduction="mean", ignore_index=-100):
    """Return a small float32 loss and its gradients, with nonfinite rows that are ignored."""
    generator = torch.Generator().manual_seed(0)
    input, head = torch.randn(8, 16, generator=generator), torch.randn(200, 16, generator=generator)
    input[target == ignore_index] = torch.inf
    leaves = [tensor.to(device).requires_grad_() for tensor in (input, head)]
    loss = ours.linear_cross_entropy(*leaves, target.to(device), reduction=reduction, ignore_index=ignore_index)
    loss.backward()
    return [tensor.cpu() for tensor in (loss.detach(), *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [[], [2, 5], list(range(8))], ids=["no row", "some rows", "all rows"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignored_rows_of_a_small_loss_contribute_nothing(ignore_index, ignored, reduction):
    target = torch.arange(10, 18)
    target[ignored] = ignore_index
    on_npu, on_cpu = (_small_step(target, device, reduction, ignore_index) for device in ("npu", "cpu"))
    torch.testing.assert_close(on_npu, on_cpu, equal_nan=True)
    assert all(gradient.isfinite().all() for gradient in on_npu[1:])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("index", [-1, -101, 200, 2**40])
def test_a_small_loss_with_a_target_outside_the_classes_is_nan(index, reduction):
    target = torch.arange(8)
    target[5] = index
    loss, input_grad, head_grad = _small_step(target, "npu", reduction)
    assert loss.isnan() and input_grad[5].isnan().all() and head_grad.isnan().any()


def _small_derivatives(device, of, function):
    """Return derivatives of a small float32 loss with an ignored row, with respect to the leaves that ``of`` names."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).to(device) for shape in ((8, 16), (200, 16))]
    target = torch.arange(10, 18).index_fill(0, torch.tensor([2]), -100).to(device)
    needed = [leaf.requires_grad_() for leaf, name in zip(leaves, ("input", "head"), strict=True) if name in of]
    loss = ours.linear_cross_entropy(*leaves, target)
    return [derivative.cpu() for derivative in function(loss, needed)]


def _first(loss, leaves):
    return torch.autograd.grad(loss, leaves, 2 * torch.ones_like(loss))


def _second(loss, leaves):
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return *first, *torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)


@pytest.mark.parametrize("of", [("input",), ("head",), ("input", "head")], ids=" and ".join)
@pytest.mark.parametrize("function", [_first, _second])
def test_the_derivatives_of_a_small_loss_are_the_cpus(of, function):
    torch.testing.assert_close(_small_derivatives("npu", of, function), _small_derivatives("cpu", of, function))


@pytest.mark.parametrize("index", [-1, 200])
def test_with_check_values_a_class_out_of_range_raises(index):
    with checked_values(), pytest.raises(IndexError, match=rf"Target {index} is out of bounds"):
        _small_step(torch.tensor([3, index, *range(6)]), "npu")


@pytest.mark.parametrize("index", [-1, 5])
def test_with_check_values_an_index_out_of_range_raises(index):
    sentence = f"embedding: indices must be from 0 to 4 .*, but one is {index}"
    with checked_values(), pytest.raises(IndexError, match=sentence):
        ours.embedding(torch.tensor([0, index]).npu(), torch.rand(5, 3).npu())


def test_indices_with_the_maximum_rank_have_a_gradient():
    # The gradient's rank is one higher than that of the indices.
    weight = torch.rand(5, 3)
    indices = torch.tensor([0, 4]).reshape((1,) * 6 + (2,))
    on_npu = weight.npu().requires_grad_()
    ours.embedding(indices.npu(), on_npu).sum().backward()
    expected = torch.zeros(5, 3).index_fill_(0, indices.flatten(), 1)
    assert torch.equal(on_npu.grad.cpu(), expected)


def test_patched_modules_of_torch_launch_canns_operators():
    rows, truth = torch.rand(4, 3).npu().requires_grad_(), torch.rand(4, 3).npu()
    table, head = torch.nn.Embedding(5, 3).npu(), torch.nn.Linear(3, 200, dtype=torch.bfloat16).npu().weight
    index = torch.tensor([1, 2, 1, 0]).npu()
    with counted_launches() as launches, torch_aclnn_ops.patch():
        loss = torch.nn.MSELoss()(rows, truth) + torch.nn.BCELoss()(rows, truth) + table(index).sum()
        if hasattr(torch.nn.functional, "linear_cross_entropy"):
            loss = loss + torch.nn.functional.linear_cross_entropy(rows.bfloat16(), head, index)
        loss.backward()
    operators = ["aclnnMseLossBackward", "aclnnBinaryCrossEntropyBackward", "aclnnEmbeddingDenseBackward"]
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        operators.append(GRADIENTS)
    assert all(launches[operator] == 1 for operator in operators)


@pytest.mark.parametrize("outputs", [(), ("logsumexp", "log_probabilities")], ids=str)
def test_a_shifted_loss_uses_the_fused_operators_and_has_the_cpus_results(outputs):
    results = []
    for device in ("npu", "cpu"):
        torch.manual_seed(0)
        hidden = torch.randn(2, 4, 16).bfloat16().to(device).requires_grad_()
        head, labels = torch.randn(200, 16).bfloat16().to(device), torch.arange(8).reshape(2, 4).to(device)
        with counted_launches() as launches:
            result = ours.linear_cross_entropy(hidden, head, labels, shift=True, outputs=outputs)
        tensors = [each for each in result if each is not None] if outputs else [result]
        sum(each.sum() for each in tensors).backward()
        results.append([each.detach().cpu() for each in (*tensors, hidden.grad.float())])
        if device == "npu":
            assert launches["aclnnFusedLinearOnlineMaxSum"] == 1
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
