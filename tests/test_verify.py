"""verify: everything is right on this CPU, and what is wrong is found."""

import functools
import json
from pathlib import Path

from torch_aclnn_ops import functional, ops, optim, verify
from torch_aclnn_ops._drop_ins import DROP_INS

import pytest
import torch


def test_everything_is_right_on_the_cpu_and_nothing_else_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert verify.main(["--device", "cpu", "--quick", "--json", "report.json"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    table, report = capsys.readouterr().out.splitlines(), json.loads(Path("report.json").read_text())
    assert table[-1] == f"0 of {len(report['checks'])} checks are wrong."
    assert len(table) == len(report["checks"]) + 1
    assert {check["is_right"] for check in report["checks"]} == {True}


def test_every_drop_in_is_checked_in_every_dtype():
    names = [outcome.name for outcome in verify.verify("cpu", quick=True)]
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert {f"{name}, {dtype}" for name in DROP_INS for dtype in dtypes} <= set(names)


def test_measurements_are_neither_right_nor_wrong(monkeypatch):
    measured = [outcome for outcome in verify.verify("cpu") if outcome.group == "measured"]
    assert len(measured) == len(DROP_INS) + 1
    assert all(outcome.is_right is None and " ms, torch " in outcome.detail for outcome in measured)


def test_a_measurement_that_fails_is_wrong_and_the_others_are_still_made(monkeypatch):
    monkeypatch.setattr(functional, "embedding", lambda *_: 1 / 0)
    measured = [outcome for outcome in verify.verify("cpu") if outcome.group == "measured"]
    assert len(measured) == len(DROP_INS) + 1
    [failed] = [outcome for outcome in measured if outcome.is_right is not None]
    assert failed.name.startswith("embedding") and not failed.is_right and "ZeroDivisionError" in failed.detail


def _wrong(function):
    @functools.wraps(function)
    def wrong(*args, **kwargs):
        result = function(*args, **kwargs)
        return result * 1.1 if isinstance(result, torch.Tensor) else result

    return wrong


def _no_step(self, closure=None):
    pass


FAULTS = {
    "a loss": (functional, "mse_loss", _wrong(functional.mse_loss), "mse_loss"),
    "a gradient of a shard": (
        ops,
        "fused_linear_cross_entropy_loss_grad",
        lambda *args: tuple(2 * one for one in ops.fused_linear_cross_entropy_loss_grad.run(*args)),
        "raw operators",
    ),
    "a step": (optim.FusedEmaAdam, "step", _no_step, "steps"),
    "an exception": (functional, "embedding", lambda *_: 1 / 0, "embedding"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_the_others_are_still_checked(fault, monkeypatch, capsys):
    module, name, wrong, what = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    assert verify.main(["--device", "cpu", "--quick"]) == 1
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert all(("WRONG" in line) == (what in line) for line in lines)


def test_a_machine_without_an_npu_is_told_what_to_run(capsys):
    assert verify.main([]) == 2
    assert "`python -m host_npu -m torch_aclnn_ops.verify`" in capsys.readouterr().err
