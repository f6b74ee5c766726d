"""report: which implementations computed the calls of some steps, where they came from, and how often."""

import json
from concurrent.futures import ThreadPoolExecutor

from torch_aclnn_ops import _call_log, functional, optim, report

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


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.every_nth_case(2))]
)
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
