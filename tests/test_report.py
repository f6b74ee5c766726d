"""explain and report: the implementations of calls, the sources of these calls, and their number."""

import json
from concurrent.futures import ThreadPoolExecutor

from torch_aclnn_ops import _call_log, explain, functional, optim, report

import pytest
import torch


def _mse_loss(dtype=torch.float32):
    functional.mse_loss(torch.ones(3, dtype=dtype, requires_grad=True), torch.zeros(3, dtype=dtype)).backward()


def _counts(operator):
    return {name: operator[name] for name in ("calls", "cann", "torch", "fallback")}


ROWS = torch.rand(3, 2, requires_grad=True), torch.rand(4, 2, requires_grad=True), torch.tensor([0, 1, 2])


def _linear(**options):
    functional.linear_cross_entropy(*ROWS, **options).sum().backward()


CALLS = {
    "mse_loss": (_mse_loss, "mse_loss_backward", "torch"),
    "embedding": (lambda: functional.embedding(ROWS[2], ROWS[1]).sum().backward(), "embedding_dense_backward", "torch"),
    "linear_cross_entropy": (_linear, "linear_cross_entropy", "fallback"),
    "unreduced linear_cross_entropy": (lambda: _linear(reduction="none"), "linear_cross_entropy", "fallback"),
    "a sparse gradient": (lambda: functional.embedding(ROWS[2], ROWS[1], sparse=True), "embedding", "torch"),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_counted_once_with_what_computed_it(name):
    call, operator, implementation = CALLS[name]
    with report() as counts:
        for _ in range(3):
            call()
    [(found, counted)] = counts.as_dict()["operators"].items()
    assert found == operator
    assert _counts(counted) == {"calls": 3, "cann": 0, "torch": 0, "fallback": 0, implementation: 3}


def test_every_parameter_that_a_step_updates_is_a_call():
    weights = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
    optimizer = optim.FusedEmaAdam(weights, master_weights=False)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with report() as counts:
        optimizer.step()
    operator = counts.as_dict()["operators"]["apply_fused_ema_adam_"]
    assert _counts(operator) == {"calls": 2, "cann": 0, "torch": 1, "fallback": 1}
    assert weights[0].detach().ne(1).all()


def test_a_reason_names_the_line_of_the_caller():
    with report() as counts:
        _mse_loss()
    assert json.loads(json.dumps(counts.as_dict())) == counts.as_dict()
    [reason] = counts.as_dict()["operators"]["mse_loss_backward"]["reasons"]
    assert reason == {
        "implementation": "torch",
        "reason": "the tensors are on cpu",
        "called_from": f"tests/test_report.py:{_mse_loss.__code__.co_firstlineno + 1}",
        "calls": 1,
    }


def test_the_table_has_the_counts_and_the_reasons():
    with report() as counts:
        _mse_loss()
    header, row, reason = str(counts).splitlines()
    assert header.split() == ["operator", "calls", "CANN", "torch", "fallback"]
    assert row.split() == ["mse_loss_backward", "1", "-", "1", "-"]
    assert reason.strip().startswith("1 from tests/test_report.py:")
    assert reason.endswith(": native PyTorch kernel, because the tensors are on cpu")


def test_a_report_without_calls_says_so():
    _mse_loss()
    with report() as counts:
        torch.ones(2).sum()
    _mse_loss()
    assert str(counts) == "no operator of torch_aclnn_ops was called"


def test_a_report_that_is_used_again_counts_on_and_one_inside_another_counts_the_same():
    outer = report()
    for _ in range(2):
        with outer, report() as inner:
            _mse_loss()
        assert inner.as_dict()["operators"]["mse_loss_backward"]["calls"] == 1
    assert outer.as_dict()["operators"]["mse_loss_backward"]["calls"] == 2


def test_calls_of_other_threads_are_counted():
    with report() as counts:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: _mse_loss(), range(8)))
    assert counts.as_dict()["operators"]["mse_loss_backward"]["calls"] == 8


def test_a_report_ends_when_the_step_raises():
    with pytest.raises(ZeroDivisionError), report() as counts:
        _mse_loss()
        raise ZeroDivisionError
    assert counts.as_dict()["operators"]["mse_loss_backward"]["calls"] == 1
    assert not _call_log.is_logging()


def _losses():
    loss = functional.linear_cross_entropy(*ROWS) + functional.mse_loss(ROWS[0], torch.zeros(3, 2))
    return loss + functional.linear_kl_div(*ROWS[:2], *(one.detach() for one in ROWS[:2]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_in_compiled_code_losses_on_a_head_are_counted_and_other_drop_ins_are_not(backend):
    compiled = torch.compile(_losses, backend=backend, fullgraph=True)
    with report() as counts:
        for _ in range(2):
            compiled().backward()
    operators = counts.as_dict()["operators"]
    calls = {name: operator["calls"] for name, operator in operators.items()}
    assert calls == {"linear_cross_entropy": 2, "linear_kl_div": 2}
    places = {reason["called_from"] for operator in operators.values() for reason in operator["reasons"]}
    assert places == {f"tests/test_report.py:{_losses.__code__.co_firstlineno}"}


def test_a_compiled_step_of_the_optimizer_is_counted():
    weight = torch.nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.ones(3, 4)
    with report() as counts:
        torch.compile(optim.FusedEmaAdam([weight]).step, backend="eager")()
    assert counts.as_dict()["operators"]["apply_fused_ema_adam_"]["calls"] == 1


_NATIVE = "native PyTorch kernel, because the tensors are on cpu"
_FORMULA = "PyTorch fallback, because"


def _explain_a_head(**options):
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
    assert _explain_a_head(**options) == f"linear_cross_entropy: {_FORMULA} the tensors are on cpu; {plan}"


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
