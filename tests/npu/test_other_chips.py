"""Chips with fewer operators and dtypes: drop-ins fall back to PyTorch, and raw operators raise."""

from functools import partial

import torch_aclnn_ops
from torch_aclnn_ops import _extension, doctor, ops
from torch_aclnn_ops import functional as ours

import pytest
import torch
from host_npu import _operators

from tests._contract import Maker
from tests.npu._operators import CONTRACTS, good_arguments, to_npu

CHIP = _extension.soc()
_only = pytest.mark.skipif(CHIP in ("Ascend910B", "Ascend910_93"), reason="this chip has everything")


def _linear():
    make = Maker(torch.float16)
    return make.normal(4, 3).npu(), make.normal(128, 3).npu(), make.index(128, 4).npu()


@_only
def test_linear_cross_entropy_falls_back_to_pytorch():
    input, weight, target = _linear()
    tensors = input.requires_grad_(), weight.requires_grad_(), target
    said = torch_aclnn_ops.explain(ours.linear_cross_entropy, *tensors)
    reason = f"CANN's operator is not supported on {CHIP}"
    assert said.startswith(f"linear_cross_entropy: PyTorch fallback, because {reason}; ")
    ours.linear_cross_entropy(input, weight, target).backward()
    assert input.grad is not None


def _calls():
    """Return a call of each raw operator that is valid on every chip that has the operator."""
    input, weight, target = _linear()
    mask, ones = torch.zeros(1, dtype=torch.uint8).npu(), torch.ones(4).npu()
    state, step = [torch.rand(4).npu() for _ in range(5)], torch.tensor([1]).npu()
    good = {contract.OPERATOR: to_npu(good_arguments(contract)) for contract in CONTRACTS}
    return {
        **{operator.name: operator.complete(arguments, {}) for operator, arguments in good.items()},
        "apply_fused_ema_adam_": (*state, step, 0.1, 0.9, 0.9, 0.9, 1e-8, 1, True, 0.0),
        "fused_cross_entropy_loss_with_max_sum": (ones, ones, ones, None),
        "fused_linear_cross_entropy_loss_grad": (ones, input, weight, mask, target, ones, ones, None),
        "fused_linear_online_max_sum": (input, weight, target, 0, 128, True),
    }


_MISSING = {
    "Ascend910": {name for name in ops.__all__ if name.startswith(("apply", "fused"))},
    "Ascend310P": {name for name in ops.__all__ if name.startswith(("apply", "embedding", "fused"))},
    "Ascend950": {name for name in ops.__all__ if name.startswith("fused_linear")},
}


@_only
@pytest.mark.parametrize("name", ops.__all__)
def test_a_raw_operator_missing_on_the_chip_raises_before_the_queue(name):
    operator, call = getattr(torch.ops.torch_aclnn_ops, name), _calls()[name]
    arguments = {argument.name: value for argument, value in zip(operator.default._schema.arguments, call, strict=True)}
    for way in (operator, getattr(ops, name)):
        if name in _MISSING[CHIP]:
            with pytest.raises(NotImplementedError, match=f"{name}: CANN's operator is not supported on {CHIP}; "):
                way(**arguments)
        else:
            way(**arguments)
    torch.npu.synchronize()
    assert torch.ones(2).npu().sum().item() == 2


@_only
def test_arguments_invalid_on_every_chip_raise_as_such():
    input, weight, target = _linear()
    with pytest.raises(ValueError, match="fused_linear_online_max_sum: "):
        torch.ops.torch_aclnn_ops.fused_linear_online_max_sum(input, weight, target[:2], 0, 128, True)


@pytest.mark.skipif(CHIP not in ("Ascend910", "Ascend310P"), reason="this chip has bfloat16")
@pytest.mark.parametrize("call", [ops.mse_loss_backward, torch.ops.torch_aclnn_ops.mse_loss_backward])
def test_bfloat16_raises_in_the_raw_operator(call):
    tensors = [torch.rand(3).bfloat16().npu() for _ in range(3)]
    with pytest.raises(RuntimeError, match="returned 161002"):
        call(*tensors, 0)


@_only
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ema_weights_are_swapped_without_bfloat16(dtype, steps):
    weight = torch.rand(3, dtype=dtype).npu().requires_grad_()
    optimizer = torch_aclnn_ops.optim.FusedEmaAdam([weight], lr=0.1)
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()
    before = weight.tolist()
    with optimizer.swap_ema_params():
        assert (weight.tolist() == before) == (steps == 0)
        weight.data = weight.data.half()
    assert weight.dtype == dtype
    assert weight.tolist() == before


@_only
@pytest.mark.simulator
def test_the_host_npu_lists_the_operators_that_the_chip_lacks():
    by_cann = {getattr(ops, name).cann: name for name in ops.__all__}
    lines = [line for cann in by_cann for line in _operators.found(cann, CHIP)]
    lacking = {by_cann[line.partition(":")[0]] for line in lines if line.endswith(f"but {CHIP} has no kernel of it")}
    assert lacking == _MISSING[CHIP]


@_only
def test_the_doctor_checks_what_the_chip_has():
    outcomes = list(doctor.check())
    assert [outcome for outcome in outcomes if not outcome.is_right] == []
    halves = {"torch.bfloat16", "torch.float16"} if CHIP == "Ascend950" else {"torch.float16"}
    assert {word for outcome in outcomes for word in outcome.name.split() if word.endswith("float16")} == halves


@_only
@pytest.mark.parametrize("name", ops.__all__)
def test_explain_and_the_doctor_report_a_missing_operator(name):
    call = partial(torch_aclnn_ops.explain, getattr(ops, name), *_calls()[name])
    path = doctor.operator_paths()[name]["npu"]
    reason = f"CANN's operator is not supported on {CHIP}"
    cann = getattr(ops, name).cann
    if name in _MISSING[CHIP]:
        with pytest.raises(NotImplementedError, match=f"^{name}: {reason}; drop-in functions"):
            call()
        assert path == f"PyTorch fallback: {reason}"
    else:
        assert call() == f"{name}: {cann}" and path == cann
