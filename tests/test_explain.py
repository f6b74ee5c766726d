"""explain: makes a call, and shows which implementation it uses."""

from torch_aclnn_ops import explain, functional, optim

import pytest
import torch

_NATIVE = "native PyTorch kernel, because the tensors are on cpu"
_FORMULA = "PyTorch fallback, because"


def _linear(**options):
    rows, head = (torch.rand(number, 2, requires_grad=True) for number in (3, 4))
    return explain(functional.linear_cross_entropy, rows, head, torch.arange(3), **options)


def test_a_name_is_not_a_function():
    with pytest.raises(TypeError, match="^explain: function must be a function or module, but it is 'mse_loss'$"):
        explain("mse_loss", torch.ones(2), torch.ones(2))


def test_a_call_that_falls_back_to_torch_is_shown():
    integers = torch.ones(2, dtype=torch.int64)
    said = explain(torch.add, integers, integers)
    assert said == "no operator of torch_aclnn_ops: torch's own functions compute this call"


_PLAN = "1 chunk of 3 rows, 0.0 MB of buffers"


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, "few logits: all 3 rows in one chunk"),
        ({"lse_square_scale": 1e-4}, "few logits: all 3 rows in one chunk"),
        ({"chunk_size": 3}, f"gradients computed in the forward pass; {_PLAN}"),
        ({"chunk_size": 2}, "gradients computed in the forward pass; 2 chunks of 2 rows, 0.0 MB of buffers"),
        ({"max_memory": 16}, "gradients computed in the forward pass; 3 chunks of 1 row, 0.0 MB of buffers"),
        (
            {"reduction": "none", "chunk_size": 3},
            f"{_PLAN}\nlinear_cross_entropy: logits recomputed for the gradients; {_PLAN}",
        ),
    ],
    ids=str,
)
def test_a_linear_cross_entropy_shows_its_chunks(options, plan):
    assert _linear(**options) == f"linear_cross_entropy: {_FORMULA} the tensors are on cpu; {plan}"


def test_no_gradient_is_added_and_what_the_function_refers_to_is_differentiated_again():
    module, rows = torch.nn.Linear(3, 1), torch.rand(4, 3, requires_grad=True)
    squares = rows * rows
    for call, arguments in (
        (lambda target: functional.mse_loss(module(squares), target), (torch.rand(4, 1),)),
        (functional.mse_loss, (squares, torch.rand(4, 3))),
    ):
        assert explain(call, *arguments) == f"mse_loss_backward: {_NATIVE}"
        assert module.weight.grad is None and rows.grad is None
        functional.mse_loss(squares, torch.zeros(4, 3)).backward(retain_graph=True)
        rows.grad = None


def _optimizer(dtype=torch.float32, strides=(4, 1), **options):
    weights = [torch.nn.Parameter(torch.ones(64, dtype=dtype).as_strided((3, 4), strides)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return optim.FusedEmaAdam(weights, **options), weights


_ADAM = "apply_fused_ema_adam_: {}, because the tensors are on cpu{}"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, _ADAM.format("native PyTorch kernel", "")),
        ({"flatten": True, "ema_warmup": "ratio"}, _ADAM.format("native PyTorch kernel", "")),
        ({"dtype": torch.bfloat16}, _ADAM.format("native PyTorch kernel", "")),
        ({"dtype": torch.bfloat16, "master_weights": False}, _ADAM.format("PyTorch fallback", " in torch.bfloat16")),
        ({"strides": (8, 2)}, _ADAM.format("PyTorch fallback", " and not dense")),
    ],
    ids=str,
)
def test_a_step_of_an_optimizer_is_explained_and_made(options, path):
    (optimizer, weights), (other, expected) = _optimizer(**options), _optimizer(**options)
    assert explain(optimizer.step) == path
    other.step()
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("flatten", [False, True])
def test_an_optimizer_step_without_gradients_is_explained(flatten):
    optimizer, weights = _optimizer(flatten=flatten)
    optimizer.zero_grad()
    assert explain(optimizer.step) == "apply_fused_ema_adam_: not called, because no parameter has a gradient"


def test_the_log_shows_the_implementation_of_an_optimizer_step(caplog):
    optimizer, _ = _optimizer()
    with caplog.at_level("DEBUG", "torch_aclnn_ops"):
        optimizer.step()
    assert [record.getMessage() for record in caplog.records] == [_ADAM.format("native PyTorch kernel", "")]


def test_a_call_inside_a_transform_is_explained():
    rows, head = torch.rand(4, 3), torch.rand(8, 3)
    text = explain(torch.func.grad(lambda each: functional.linear_kl_div(each, head, each.detach(), head)), rows)
    assert text.startswith("linear_kl_div: PyTorch fallback, because inside a transform")
