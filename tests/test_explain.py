"""explain: which path a call takes, without a trace of having looked."""

import copy
from functools import partial

from torch_aclnn_ops import _cpu_extension, explain, functional, optim
from torch_aclnn_ops.ops._head import products

import pytest
import torch
from torch.utils._pytree import tree_leaves

_NATIVE = "native kernel of torch, because the tensors are on cpu"
_FORMULA = "formula in torch calls, because"


def _linear(**options):
    rows, head, target = (
        torch.rand(3, 2, requires_grad=True),
        torch.rand(4, 2, requires_grad=True),
        torch.tensor([0, 1, 2]),
    )
    return explain(functional.linear_cross_entropy, rows, head, target, **options)


def test_a_drop_in_reaches_its_operator():
    assert (
        explain(functional.mse_loss, torch.rand(2, requires_grad=True), torch.rand(2))
        == f"mse_loss_backward: {_NATIVE}"
    )


def test_a_raw_operator_that_is_called_directly_is_named_too():
    tensor = torch.rand(2)
    lines = explain(torch.ops.torch_aclnn_ops.mse_loss_backward, tensor, tensor, tensor, 0)
    assert lines == f"mse_loss_backward: {_NATIVE}"


def test_a_call_that_is_left_to_torch_says_so():
    integers = torch.ones(2, dtype=torch.int64)
    assert explain(torch.add, integers, integers) == (
        "no operator of torch_aclnn_ops: torch's own functions serve this call"
    )


_PLAN = "1 chunk of 3 rows, 0.0 MB held"


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, f"gradients made in the forward pass; {_PLAN}"),
        ({"label_smoothing": 0.1}, f"gradients made in the forward pass; {_PLAN}"),
        ({"chunk_size": 2}, "gradients made in the forward pass; 2 chunks of 2 rows, 0.0 MB held"),
        ({"max_memory": 16}, "gradients made in the forward pass; 3 chunks of 1 rows, 0.0 MB held"),
        ({"reduction": "none"}, f"{_PLAN}\nlinear_cross_entropy: logits computed again for the gradients; {_PLAN}"),
    ],
    ids=str,
)
def test_a_linear_cross_entropy_tells_its_plan(options, plan, monkeypatch):
    monkeypatch.setattr(products, "has_row_kernels", lambda weight: False)
    assert _linear(**options) == f"linear_cross_entropy: {_FORMULA} the tensors are on cpu; {plan}"


@pytest.mark.skipif(_cpu_extension.why_unavailable() is not None, reason="the CPU kernels are not built")
def test_a_linear_cross_entropy_tells_the_vectors_of_the_chip():
    assert _linear().endswith(f"{_PLAN}; rows by {_cpu_extension.vectors()} kernels")


def test_a_call_whose_tensors_are_bound_tells_its_plan_too():
    tensors = torch.rand(3, 2, requires_grad=True), torch.rand(4, 2, requires_grad=True), torch.tensor([0, 1, -100])
    assert _PLAN in explain(partial(functional.linear_cross_entropy, *tensors))


def test_a_module_gets_no_gradients():
    module = torch.nn.Linear(3, 1)
    explain(lambda rows, target: functional.mse_loss(module(rows), target), torch.rand(4, 3), torch.rand(4, 1))
    assert module.weight.grad is None


def _optimizer(dtype=torch.float32, strides=(4, 1), **options):
    weights = [torch.nn.Parameter(torch.ones(64, dtype=dtype).as_strided((3, 4), strides)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return optim.FusedEmaAdam(weights, **options), weights


_ADAM = "apply_fused_ema_adam_: {}, because the tensors are on cpu{}"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, _ADAM.format("native kernels of torch", "")),
        ({"flatten": True, "ema_warmup": "ratio"}, _ADAM.format("native kernels of torch", "")),
        ({"dtype": torch.bfloat16}, _ADAM.format("native kernels of torch", "")),
        (
            {"dtype": torch.bfloat16, "master_weights": False},
            _ADAM.format("formula in torch calls", " in torch.bfloat16"),
        ),
        ({"strides": (8, 2)}, _ADAM.format("formula in torch calls", " and have gaps")),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_tells_its_path_and_stays_as_it_was(options, path, steps):
    optimizer, weights = _optimizer(**options)
    for _ in range(steps):
        optimizer.step()
    pointers = [weight.data_ptr() for weight in weights]
    before = copy.deepcopy((optimizer.state_dict(), weights, [weight.grad for weight in weights]))
    assert explain(optimizer.step) == path
    assert [weight.data_ptr() for weight in weights] == pointers
    after = (optimizer.state_dict(), weights, [weight.grad for weight in weights])
    for now, then in zip(tree_leaves(after), tree_leaves(before), strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
    optimizer.step()
    assert all(int(optimizer.state[weight]["step"]) == steps + 1 for weight in weights)


def test_an_optimizer_without_gradients_says_so():
    optimizer, weights = _optimizer()
    optimizer.zero_grad()
    assert explain(optimizer.step) == "apply_fused_ema_adam_: not called, because no parameter has a gradient"


def test_the_log_says_what_an_optimizers_step_does(caplog):
    optimizer, _ = _optimizer()
    with caplog.at_level("DEBUG", "torch_aclnn_ops"):
        optimizer.step()
    assert [record.getMessage() for record in caplog.records] == [_ADAM.format("native kernels of torch", "")]


def test_arguments_that_are_results_of_others_are_taken_too():
    weight = torch.rand(2, requires_grad=True)
    assert explain(functional.mse_loss, weight * 2, torch.rand(2)) == f"mse_loss_backward: {_NATIVE}"
