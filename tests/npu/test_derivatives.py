"""Derivatives on an NPU: raw operators without the C++ kernel, and the extension's functions for eager calls."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from tests import test_native_functions as native
from tests._contract import HALF_DTYPES
from tests._modes import Calls, FunctionCalls
from tests.npu._operators import each_contract, each_differentiable, each_mutable, flat, good_arguments, to_npu


def _positions(contract):
    return contract.SAMPLES[0].differentiable


def _arguments_on(device, contract):
    return [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in good_arguments(contract)]


@each_differentiable
@pytest.mark.parametrize("entry", ["the operator", "the package's function"])
def test_gradients_are_the_cpus(contract, entry):
    operator = contract.OPERATOR.overload if entry == "the operator" else contract.OPERATOR
    gradients = []
    for device in ("cpu", "npu"):
        arguments = _arguments_on(device, contract)
        inputs = [arguments[position].requires_grad_() for position in _positions(contract)]
        outputs = [out for out in flat(operator(*arguments)) if out.requires_grad]
        assert outputs
        gradients.append(torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs]))
    assert all(mine.device.type == "npu" for mine in gradients[1])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-2, atol=2e-2, check_device=False)


@each_differentiable
def test_nothing_requires_grad_if_no_input_does(contract):
    arguments = to_npu(good_arguments(contract))
    assert not any(output.requires_grad for output in flat(contract.OPERATOR.overload(*arguments)))
    with torch.no_grad():
        arguments[_positions(contract)[0]].requires_grad_()
        assert not any(output.requires_grad for output in flat(contract.OPERATOR.overload(*arguments)))


@each_mutable
def test_an_in_place_operator_raises_for_derivatives(contract):
    arguments = to_npu(good_arguments(contract))
    arguments[_positions(contract)[0]].requires_grad_()
    with pytest.raises(RuntimeError, match="must not require grad"):
        contract.OPERATOR.overload(*arguments)


@each_differentiable
def test_a_forward_derivative_equals_the_cpus_or_raises(contract):
    outcomes = []
    for device in ("cpu", "npu"):
        arguments, position = _arguments_on(device, contract), _positions(contract)[0]
        with forward_ad.dual_level():
            arguments[position] = forward_ad.make_dual(arguments[position], torch.ones_like(arguments[position]))
            try:
                outputs = flat(contract.OPERATOR.overload(*arguments))
                tangent = forward_ad.unpack_dual(outputs[0]).tangent
                outcomes.append(None if tangent is None else tangent.cpu())
            except (RuntimeError, NotImplementedError) as error:
                outcomes.append(type(error))
    if isinstance(outcomes[0], torch.Tensor):
        torch.testing.assert_close(outcomes[1], outcomes[0], rtol=2e-2, atol=2e-2)
    else:
        assert outcomes[1] is outcomes[0]


@each_differentiable
def test_vmap_is_a_loop(contract):
    arguments = to_npu(good_arguments(contract))
    position = _positions(contract)[0]
    batch = torch.stack([arguments[position], arguments[position] * 2])

    def call(tensor):
        return contract.OPERATOR.overload(*arguments[:position], tensor, *arguments[position + 1 :])

    for batched, *single in zip(flat(torch.vmap(call)(batch)), flat(call(batch[0])), flat(call(batch[1])), strict=True):
        torch.testing.assert_close(batched, torch.stack(single))


@each_differentiable
def test_a_transform_reaches_the_kernel_below_it(contract):
    arguments = to_npu(good_arguments(contract))
    position = _positions(contract)[0]

    def loss(tensor):
        outputs = flat(contract.OPERATOR(*arguments[:position], tensor, *arguments[position + 1 :]))
        return sum(output.float().sum() for output in outputs if output.is_floating_point())

    gradient = torch.func.grad(loss)(arguments[position])
    tensor = arguments[position].clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(loss(tensor), tensor)[0])


@each_contract
def test_fake_tensors_and_modes_come_before_the_kernel(contract):
    arguments = to_npu(good_arguments(contract))
    expected = flat(contract.OPERATOR.overload(*arguments))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in arguments]
        outputs = flat(contract.OPERATOR.overload(*fakes))
    found, expected = ([(one.shape, one.dtype, one.device) for one in each] for each in (outputs, expected))
    assert found == expected
    with Calls() as calls:
        contract.OPERATOR.overload(*arguments)
    assert contract.OPERATOR.overload in calls.operators


class TestEntry:
    """The extension's entry point in place of torch.ops."""

    operator = staticmethod(torch.ops.torch_aclnn_ops.mse_loss_backward)

    def test_it_is_registered(self):
        assert inspect.isbuiltin(self.operator._op) and self.operator._op.__name__ == "mse_loss_backward"

    def test_arguments_by_name_in_any_order(self):
        one, two, three = (torch.rand(3).npu() for _ in range(3))
        expected = self.operator(one, two, three, 1)
        for call in (
            self.operator(one, two, target=three, reduction=1),
            self.operator(reduction=1, target=three, self=two, grad_output=one),
            self.operator(one, torch.nn.Parameter(two), three, 1),
        ):
            assert torch.equal(call, expected)

    def test_invalid_calls_raise_torchs_errors(self):
        one = torch.rand(3).npu()
        for args, kwargs in (((one, one), {}), ((one, one, one, "mean"), {}), ((one, one, one, 1), {"other": 1})):
            with pytest.raises((RuntimeError, TypeError), match="mse_loss_backward"):
                self.operator(*args, **kwargs)
        with pytest.raises(RuntimeError):
            self.operator(one, one, one, 2**70)

    def test_subclasses_and_modes_intercept_the_call(self):
        class Marked(torch.Tensor):
            pass

        one = torch.rand(3).npu()
        assert isinstance(self.operator(one.as_subclass(Marked), one, one, 0), Marked)
        with FunctionCalls() as calls:
            self.operator(one, one, one, 0)
        assert self.operator in calls.functions or self.operator.default in calls.functions

    def test_optional_and_keyword_only_arguments(self):
        one = torch.rand(3).npu()
        bce = torch.ops.torch_aclnn_ops.binary_cross_entropy_backward
        assert torch.equal(bce(one, one, one, None, 0), bce(one, one, one, torch.ones(3).npu(), 0))
        with pytest.raises(RuntimeError):
            bce(one, one, one, "weight", 0)
        adam = torch.ops.torch_aclnn_ops.apply_fused_ema_adam_
        states = [torch.rand(3).npu() for _ in range(5)]
        numbers = {"lr": 0.1, "ema_decay": 0.9, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}
        rest = {"weight_decay_mode": 1, "bias_correction": True, "weight_decay": 0.0}
        before = states[1].clone()
        assert adam(*states, torch.tensor([1]).npu(), **numbers, **rest) is None
        assert not torch.equal(states[1], before)
        # Integers for floats, and other argument orders, use torch's entry point.
        assert adam(*states, torch.tensor([1]).npu(), **rest, **{**numbers, "lr": 1}) is None


@native.each_need
@pytest.mark.parametrize("name", native.FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_an_eager_call_has_the_result_and_the_gradients_of_a_cpu(name, dtype, needs):
    found, expected = (native.run(name, dtype, needs, device) for device in ("npu", "cpu"))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.cpu(), other, rtol=8 * torch.finfo(dtype).eps, atol=1e-3)
    assert found[0].grad_fn is None or "torch_aclnn_ops" in found[0].grad_fn.name()


@pytest.mark.parametrize("name", native.IN_16_BITS)
def test_autocast_runs_a_loss_in_float32(name):
    results = []
    for device in ("npu", "cpu"):
        with torch.autocast(device, torch.bfloat16):
            results.append(native.run(name, torch.bfloat16, device=device))
        assert results[-1][0].dtype == torch.float32
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5, check_device=False)
