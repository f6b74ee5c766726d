"""Invalid arguments on an NPU: the call raises a clear exception, and the next call works."""

import re
from contextlib import nullcontext

from torch_aclnn_ops import _extension, disabled, ops
from torch_aclnn_ops.optim import FusedEmaAdam

import pytest
import torch
from torch import nn

from tests import test_ema_adam
from tests._contract import Maker
from tests._optim import assert_all_equal, states_of, step_with, weights_of
from tests.npu._operators import (
    CONTRACTS,
    checked_values,
    each_contract,
    error_inputs,
    good_arguments,
    good_call,
    meaning_of,
    run_adam,
    to_npu,
)


@pytest.fixture
def values_are_read():
    with checked_values():
        yield


@pytest.mark.parametrize("entry", ["the operator", "the package's function", "_C"])
@pytest.mark.parametrize("contract, error_input", error_inputs())
def test_invalid_arguments_raise_the_same_exception_as_on_the_cpu(contract, error_input, entry, values_are_read):
    operator = contract.OPERATOR
    arguments = to_npu(error_input.arguments(Maker(torch.float32)))
    calls = {"the operator": operator.overload, "the package's function": operator}
    call = calls.get(entry, getattr(_extension._module, operator.name))
    with pytest.raises(error_input.exception, match=f"{operator.name}: {error_input.sentence}"):
        call(*operator.complete(arguments, {}))
    good_call(contract)


@pytest.mark.parametrize("error_input", test_ema_adam.ERROR_INPUTS.values(), ids=test_ema_adam.ERROR_INPUTS)
def test_adam_raises_and_changes_nothing(error_input, values_are_read):
    change, exception, sentence = error_input
    arguments = {**test_ema_adam.make_tensors(torch.float32), "step": torch.tensor([7]), **change}
    on_npu = {name: tensor.npu() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in arguments.items()}
    options = {**test_ema_adam.OPTIONS, **{k: on_npu.pop(k) for k in list(on_npu) if k in test_ema_adam.OPTIONS}}
    with pytest.raises(exception, match=f"^apply_fused_ema_adam_: {sentence}$"):
        ops.apply_fused_ema_adam_.overload(**on_npu, **options)
    for name in test_ema_adam.STATE:
        assert torch.equal(on_npu[name].cpu(), arguments[name])
    run_adam(test_ema_adam.make_tensors(torch.float32))


def _normal(*shape, dtype=torch.float32):
    return Maker(dtype).normal(*shape)


_half = torch.float16


def _linear(rows=4, classes=128, features=3, dtype=_half):
    return _normal(rows, features, dtype=dtype), _normal(classes, features, dtype=dtype)


_DOUBLE = Maker(torch.float64).normal(2, 3)
_TARGET = torch.zeros(4, dtype=torch.int64)

# Arguments valid on every device but not in CANN: operator, arguments, status and the beginning of the reason.
LIMITS = {
    "mse, float64": ("mse_loss_backward", lambda: (*[_DOUBLE] * 3, 0), 161002),
    "bce, nine dimensions": ("binary_cross_entropy_backward", lambda: (*[torch.rand(*(1,) * 9)] * 3, None, 0), 161002),
    "embedding, float64": ("embedding_dense_backward", lambda: (_DOUBLE, _TARGET[:2], 4, -1, False), 161002),
    "features": ("fused_linear_online_max_sum", lambda: (*_linear(4, 2, 65535), _TARGET, 0, 2, False), 161002),
    "loss, float64": ("fused_cross_entropy_loss_with_max_sum", lambda: (*[torch.ones(3).double()] * 3, None), 161002),
    "grad, 24576 classes with a softmax": (
        "fused_linear_cross_entropy_loss_grad",
        lambda: (torch.ones(4), *_linear(4, 24576), _TARGET[:1].byte(), _TARGET, None, None, torch.ones(4, 24576)),
        561103,
    ),
    "adam, float64": (
        "apply_fused_ema_adam_",
        lambda: (*torch.ones(5, 3).double().unbind(), torch.tensor([1]), 1e-3, 0.9, 0.9, 0.9, 1e-8, 1, True, 0.0),
        161002,
    ),
}


@pytest.mark.simulator
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", LIMITS)
def test_unsupported_arguments_raise_with_the_call_and_the_reason(name, requires_grad):
    operator_name, arguments, status = LIMITS[name]
    operator = getattr(ops, operator_name)
    on_npu = operator.complete(to_npu(arguments()), {})
    if requires_grad and not operator.is_mutable:
        on_npu[0].requires_grad_()
    with pytest.raises(RuntimeError) as caught:
        operator.dispatch(*on_npu)
    meaning = re.escape(meaning_of(status))
    assert re.match(
        rf"(aclnn\w+): phase one refused the call \(\1GetWorkspaceSize returned {status}, {meaning}\)\.\n"
        rf"CANN (says: (.|\n)+|gives no reason\.)\nThe call was \1\(\w+ (Double|Float|Half)\[",
        str(caught.value),
    )
    contract = next((one for one in CONTRACTS if one.OPERATOR is operator), None)
    if contract is not None:
        good_call(contract)


@each_contract
def test_tensors_on_two_devices_raise(contract):
    arguments = list(to_npu(good_arguments(contract)))
    arguments[1] = arguments[1].cpu()
    with pytest.raises(RuntimeError, match=r"\w+ must be on npu:0, as \w+ is, but it is on cpu"):
        contract.OPERATOR.overload(*arguments)


DOCUMENTED = (161001, 161002, 361001, *range(561000, 561004), 561101, 561102, 561103, 561107, 561112)


@pytest.mark.simulator
@pytest.mark.parametrize("status", DOCUMENTED)
def test_every_documented_status_has_a_meaning(status):
    assert meaning_of(status) != meaning_of(42)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.complex32, torch.int16, torch.float8_e4m3fn]
)
def test_unsupported_dtypes_raise(dtype):
    tensors = [torch.zeros(2, dtype=dtype, device="cpu").npu() for _ in range(3)]
    sentence = "mse_loss_backward: self must have a floating-point dtype|CANN has no"
    with pytest.raises((TypeError, RuntimeError), match=sentence):
        ops.mse_loss_backward.overload(*tensors, 0)


@pytest.mark.parametrize("change, sentence", test_ema_adam.SHARED.values(), ids=test_ema_adam.SHARED)
def test_adam_raises_for_shared_memory_before_anything_is_written(change, sentence):
    test_ema_adam.check_shared_memory_raises(change, sentence, "npu")


@pytest.fixture
def internal_formats():
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moment", ["first step", "later", "without a gradient", "disabled"])
def test_a_parameter_in_a_private_format_is_named_before_a_step_writes(moment, dtype, internal_formats):
    import torch_npu

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(20, 40)).to("npu", dtype)
    optimizer = FusedEmaAdam(model.named_parameters(), lr=0.1)
    if moment == "later":
        step_with(optimizer)
    elif moment == "without a gradient":
        optimizer.step()
    before = weights_of(model), states_of(optimizer)
    model[1].weight.data = torch_npu.npu_format_cast(model[1].weight.data, 29)
    sentence = r"parameter '1.weight' must not be in a private format.*npu_format_cast"
    with disabled() if moment == "disabled" else nullcontext(), pytest.raises(RuntimeError, match=sentence):
        step_with(optimizer)
    assert_all_equal(weights_of(model), before[0])
    assert_all_equal(states_of(optimizer), before[1])
    model[1].weight.data = torch_npu.npu_format_cast(model[1].weight.data, 2)
    step_with(optimizer)
    assert not torch.equal(model[1].weight, before[0][2])


def test_a_parameter_in_a_private_format_may_have_no_gradient(internal_formats):
    import torch_npu

    weights = [nn.Parameter(torch.ones(20, 40, device="npu")) for _ in range(2)]
    weights[0].data = torch_npu.npu_format_cast(weights[0].data, 29)
    weights[1].grad = torch.ones_like(weights[1])
    FusedEmaAdam(weights, lr=0.1).step()
    assert torch.equal(weights[0], torch.ones_like(weights[0])) and not torch.equal(*weights)


def test_a_parameter_in_a_private_format_is_flattened(internal_formats):
    import torch_npu

    weights = [nn.Parameter(torch.ones(32, 32, device="npu")) for _ in range(2)]
    weights[0].data = torch_npu.npu_format_cast(weights[0].data, 29)
    optimizer = FusedEmaAdam(weights, lr=0.1, flatten=True)
    step_with(optimizer)
    assert torch.equal(*weights) and not torch.equal(weights[0], torch.ones_like(weights[0]))
