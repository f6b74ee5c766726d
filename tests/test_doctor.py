"""The doctor's checks: everything is right on this CPU, and what is wrong is found."""

import functools
import json

from torch_aclnn_ops import doctor, functional, ops, optim
from torch_aclnn_ops._drop_ins import DROP_INS

import pytest
import torch


def test_everything_is_right_on_the_cpu_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert doctor.main(["--check", "--device", "cpu"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert doctor.main(["--check", "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert last == f"0 of {len(report['checks'])} checks are wrong." and len(table) == len(report["checks"])
    assert {check["is_right"] for check in report["checks"]} == {True}
    assert report["device"] == "cpu" and report["findings"] and report["operators"]
    assert not [*tmp_path.iterdir()]


def test_every_drop_in_is_checked_in_every_dtype():
    names = [outcome.name for outcome in doctor.check("cpu")]
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert {f"{name}, {dtype}" for name in DROP_INS for dtype in dtypes} <= set(names)


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
    assert doctor.main(["--check", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert all(("WRONG" in line) == (what in line) for line in lines)


def test_a_machine_without_an_npu_is_told_what_to_run(capsys):
    assert doctor.main(["--check"]) == 2
    assert "`python -m host_npu -m torch_aclnn_ops.doctor --check`" in capsys.readouterr().err
