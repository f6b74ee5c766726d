"""report on an NPU: calls are counted by their implementation, and launches by CANN's operators."""

from torch_aclnn_ops import disabled, functional, ops, optim, report

import pytest
import torch


def _loss(name, dtype):
    input = torch.rand(4, 3, dtype=dtype, device="npu", requires_grad=True)
    getattr(functional, name)(input, input.detach()).backward()


def _head(dtype, **options):
    rows, head = (torch.rand(n, 256, dtype=dtype, device="npu", requires_grad=True) for n in (3, 128))
    functional.linear_cross_entropy(rows, head, torch.tensor([0, 1, 2], device="npu"), **options).backward()


def _batch(**options):
    hidden, head = (torch.rand(*size, 256, device="npu").bfloat16().requires_grad_() for size in ((2, 4), (128,)))
    target = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 127]], device="npu")
    result = functional.linear_cross_entropy(hidden, head, target, **options)
    getattr(result, "loss", result).sum().backward()


def _step(**options):
    weight = torch.nn.Parameter(torch.ones(3, device="npu"))
    weight.grad = torch.ones_like(weight)
    optim.FusedEmaAdam([weight], **options).step()


def _raw(requires_grad=False):
    tensor = torch.ones(2, device="npu", requires_grad=requires_grad)
    ops.mse_loss_backward(tensor, tensor, tensor, 0)


BCE = "binary_cross_entropy"
CALLS = {
    "mse_loss": (lambda: _loss("mse_loss", torch.float32), "mse_loss_backward", "cann"),
    "mse_loss in float64": (lambda: _loss("mse_loss", torch.float64), "mse_loss_backward", "fallback"),
    "binary_cross_entropy": (lambda: _loss(BCE, torch.float16), f"{BCE}_backward", "cann"),
    "a head": (lambda: _head(torch.bfloat16), "fused_linear_cross_entropy_loss_grad", "cann"),
    "a head in float32": (lambda: _head(torch.float32), "linear_cross_entropy", "fallback"),
    "a head with a softcap": (lambda: _head(torch.bfloat16, softcap=2.0), "linear_cross_entropy", "fallback"),
    "a step": (_step, "apply_fused_ema_adam_", "cann"),
    "a raw operator": (_raw, "mse_loss_backward", "cann"),
    "a raw operator with a gradient": (lambda: _raw(True), "mse_loss_backward", "cann"),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_counted_once_with_what_computed_it(name):
    call, operator, implementation = CALLS[name]
    with report() as counts:
        for _ in range(2):
            call()
    counted = counts.as_dict()["operators"][operator]
    assert (counted["calls"], counted[implementation]) == (2, 2)
    launched = counts.as_dict()["launches"]
    assert all(number == 2 for number in launched.values())
    assert bool(launched) == (implementation == "cann")


def test_compiled_calls_are_seen_by_their_launches():
    loss = torch.compile(functional.mse_loss, backend="aot_eager", fullgraph=True)
    input = torch.rand(4, 3, device="npu", requires_grad=True)
    loss(input, input.detach()).backward()
    with report() as counts:
        loss(input, input.detach()).backward()
    assert counts.as_dict()["launches"] == {"aclnnMseLossBackward": 1}
    assert str(counts) == "launches: aclnnMseLossBackward 1"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_losses_on_a_head_are_counted_with_their_implementation(backend):
    rows, head = (torch.rand(n, 256, device="npu").bfloat16().requires_grad_() for n in (3, 128))

    def loss():
        return functional.linear_cross_entropy(rows, head, torch.tensor([0, 1, 2], device="npu"))

    with report() as counts:
        torch.compile(loss, backend=backend, fullgraph=True)().backward()
    operators, launches = counts.as_dict()["operators"], counts.as_dict()["launches"]
    [online_max_sum] = operators["fused_linear_online_max_sum"]["reasons"]
    line = loss.__code__.co_firstlineno
    assert online_max_sum["called_from"] == f"tests/npu/test_report.py:{line}" and online_max_sum["calls"] == 1
    assert len(launches) == len(operators) == 3


# Raw operators stay enabled, and torch_npu's loss does not support float64.
_OTHERS = ("a raw operator", "a raw operator with a gradient", "mse_loss in float64")
DISABLED = {name: call for name, (call, *_) in CALLS.items() if name not in _OTHERS}
DISABLED |= {
    "a batch": _batch,
    "shifted labels": lambda: _batch(shift=True),
    "shifted labels with z-loss": lambda: _batch(shift=True, lse_square_scale=0.1),
    "outputs": lambda: _batch(outputs=("log_probabilities",)),
    "losses of rows": lambda: _batch(reduction="none", token_weight=torch.ones(2, 4, device="npu")),
    "a flattened step": lambda: _step(flatten=True),
    "a step with its learning rate on the device": lambda: _step(lr=torch.ones((), device="npu")),
}


@pytest.mark.parametrize("name", DISABLED)
def test_a_disabled_package_launches_nothing(name):
    with disabled(), report() as counts:
        DISABLED[name]()
    assert counts.as_dict()["launches"] == {}
    reasons = [one["reason"] for counted in counts.as_dict()["operators"].values() for one in counted["reasons"]]
    assert reasons and all(reason.startswith("torch_aclnn_ops is disabled") for reason in reasons)


def test_a_disabled_package_launches_nothing_in_compiled_code():
    step = torch.compile(_batch, backend="aot_eager")
    with disabled(), report() as counts:
        step(outputs=("log_probabilities",))
    assert counts.as_dict()["launches"] == {}
