"""The contract of every drop-in, as tests over a table of cases; each operator's test file brings its table."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from torch_aclnn_ops import functional as ours

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.fx.experimental.proxy_tensor import make_fx

from tests import _torchs as torchs

HALF_DTYPES = (torch.float16, torch.bfloat16)

_Contract = TypeVar("_Contract")


def tables_of(contract: type[_Contract]) -> list[type[_Contract]]:
    """Return the subclasses of a contract, which are defined in the operators' test files."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if f"({contract.__name__})" in path.read_text():
            importlib.import_module(f"tests.{path.stem}")
    return contract.__subclasses__()


class Maker:
    """Makes reproducible tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def probability(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.9 + 0.05).to(self.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)


@dataclass(frozen=True)
class Case:
    """A call of a drop-in.

    Attributes:
        name: The subject of the case.
        inputs: Makes the differentiable tensors.
        call: Calls the function of a module (torch.nn.functional or ours) with the tensors.
        constants: Makes the tensors that are not differentiable.
    """

    name: str
    inputs: Callable[[Maker], tuple[Tensor, ...]]
    call: Callable[..., Tensor]
    constants: Callable[[Maker], tuple[Tensor, ...]] = lambda make: ()

    def prepare(self, dtype: torch.dtype, seed: int = 0) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """Return ``call(module, *inputs)``, and inputs that require grad."""
        maker = Maker(dtype, seed)
        inputs = tuple(tensor.requires_grad_() for tensor in self.inputs(maker))
        constants = self.constants(maker)

        def call(functional: Any, *tensors: Tensor) -> Tensor:
            return self.call(functional, *tensors, *constants)

        return call, inputs

    def prepare_constants(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """Return the call in float64 as a function of its inputs and its floating-point constants, and all of these."""
        maker = Maker(torch.float64)
        inputs, constants = self.inputs(maker), self.constants(maker)
        is_float = [tensor.is_floating_point() for tensor in constants]
        tensors = *inputs, *(tensor for tensor in constants if tensor.is_floating_point())

        def call(*tensors: Tensor) -> Tensor:
            floats = iter(tensors[len(inputs) :])
            others = [next(floats) if is_one else it for it, is_one in zip(constants, is_float, strict=True)]
            return self.call(ours, *tensors[: len(inputs)], *others)

        return call, tuple(tensor.detach().requires_grad_() for tensor in tensors)

    def prepare_truth(self, dtype: torch.dtype, seed: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """Prepare the same call in float64, on values that the dtype can represent."""
        maker = Maker(dtype, seed)
        inputs = tuple(tensor.double() for tensor in self.inputs(maker))
        constants = [tensor.double() if tensor.is_floating_point() else tensor for tensor in self.constants(maker)]
        return lambda functional, *tensors: self.call(functional, *tensors, *constants), inputs


def loss_and_gradients(call: Callable[..., Tensor], functional: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the result, and its gradients under a cotangent that is the same in every dtype."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    result = call(functional, *inputs)
    cotangent = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
    return [result.detach(), *torch.autograd.grad(result, inputs, cotangent.to(result.dtype))]


def torchs_hessian(call: Callable[..., Tensor], first: Tensor, others: list[Tensor]) -> Tensor:
    """Return torch's second derivatives in reverse mode: not every function of torch has forward mode."""
    if first.numel() == 0:
        return first.new_empty(first.shape * 2)
    hessian = torch.autograd.functional.hessian(lambda x: call(torchs.functional, x, *others).sum(), first)
    assert isinstance(hessian, Tensor)
    return hessian


def assert_no_worse_than_torch(case: Case, dtype: torch.dtype, seed: int, slack: float) -> None:
    """Compare with float64: at most torch's own error plus ``slack`` roundings of the largest value.

    The slack allows for another summation order than torch's, whose roundings have the same size.
    """
    call, inputs = case.prepare(dtype, seed)
    true_call, true_inputs = case.prepare_truth(dtype, seed)
    truths = loss_and_gradients(true_call, torchs.functional, true_inputs)
    theirs = loss_and_gradients(call, torchs.functional, inputs)
    results = loss_and_gradients(call, ours, inputs)
    for result, their, truth in zip(results, theirs, truths, strict=True):
        assert result.dtype == their.dtype
        if truth.numel() == 0:
            continue  # shapes are compared elsewhere, and there is no largest value
        error = (their.double() - truth).abs().nan_to_num(nan=torch.inf).max()  # torch's own result may overflow
        allowed = error + slack * torch.finfo(dtype).eps * truth.abs().max()
        assert (result.double() - truth).abs().max() <= allowed


def assert_derivatives_are_right_or_raise(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
    """Compare derivatives with finite differences: each kind is right, or raises because it is not supported."""
    for check in (
        lambda: gradcheck(function, tensors),
        lambda: gradcheck(function, tensors, check_forward_ad=True, check_backward_ad=False),
        lambda: gradgradcheck(function, tensors, fast_mode=True),
    ):
        try:
            check()
        except GradcheckError:
            raise
        except RuntimeError as error:
            assert re.search("derivative|differentiable|must not require grad", str(error)), error


class DropInContract:
    """The contract; a subclass sets ``CASES``."""

    CASES: list[Case]
    ROUNDINGS = 2.0  # slack in assert_no_worse_than_torch

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_result_and_gradients_equal_torchs(self, case: Case, dtype: torch.dtype) -> None:
        call, inputs = case.prepare(dtype)
        results = loss_and_gradients(call, ours, inputs)
        expected = loss_and_gradients(call, torchs.functional, inputs)
        torch.testing.assert_close(results, expected, equal_nan=True)

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
    @pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
    def test_error_is_no_worse_than_torchs(self, case: Case, dtype: torch.dtype, seed: int) -> None:
        assert_no_worse_than_torch(case, dtype, seed, self.ROUNDINGS)

    def test_a_wrapped_tensor_of_an_exited_transform_is_a_constant(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        left = []

        def keep(tensor: Tensor) -> Tensor:
            left.append(tensor * 1)
            return tensor.sum()

        for tensor in inputs:
            torch.func.grad(keep)(tensor.detach())
        result = call(ours, *left)
        assert not result.requires_grad
        torch.testing.assert_close(result, call(ours, *inputs).detach(), equal_nan=True)

    def test_first_derivatives_are_right(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        assert gradcheck(
            lambda *tensors: call(ours, *tensors),
            inputs,
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
        )

    def test_second_derivatives_are_right(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        # fast_mode compares random projections of the Jacobians; all entries would take minutes.
        assert gradgradcheck(
            lambda *tensors: call(ours, *tensors),
            inputs,
            check_fwd_over_rev=True,
            check_batched_grad=True,
            fast_mode=True,
        )

    def test_derivatives_with_respect_to_constants_are_right_or_raise(self, case: Case) -> None:
        call, tensors = case.prepare_constants()
        if len(tensors) > len(case.inputs(Maker(torch.float64))):
            assert_derivatives_are_right_or_raise(call, tensors)

    def test_every_combination_of_frozen_inputs_gives_the_same_gradients_or_none(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        _, *all_gradients = loss_and_gradients(call, ours, inputs)
        for needed in product([False, True], repeat=len(inputs)):
            tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed, strict=True)]
            result = call(ours, *tensors)
            assert result.requires_grad == any(needed)
            if not result.requires_grad:
                continue
            cotangent = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
            result.backward(cotangent)
            for tensor, need, gradient in zip(tensors, needed, all_gradients, strict=True):
                assert (tensor.grad is not None) == need
                if need:
                    torch.testing.assert_close(tensor.grad, gradient, equal_nan=True)

    def test_second_backward_of_a_retained_graph_gives_the_same_gradients(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        loss = call(ours, *inputs).sum()
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        second = torch.autograd.grad(loss, inputs)
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)

    def test_inputs_are_not_changed(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        before = [tensor.detach().clone() for tensor in inputs]
        call(ours, *inputs).sum().backward()
        for tensor, copy in zip(inputs, before, strict=True):
            assert torch.equal(tensor, copy)

    def test_the_result_may_be_changed_in_place(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        changed, expected = call(ours, *inputs).mul_(3), call(ours, *inputs) * 3
        gradients = [torch.autograd.grad(result.sum(), inputs) for result in (changed, expected)]
        torch.testing.assert_close(*gradients, equal_nan=True)

    def test_vmap_of_the_gradient_equals_a_loop(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        samples = [torch.stack([tensor.detach(), tensor.detach() * 0.5 + 0.2]) for tensor in inputs]
        gradient = torch.func.grad(lambda *tensors: call(ours, *tensors).sum(), argnums=tuple(range(len(inputs))))
        batched = torch.vmap(gradient)(*samples)
        for i in range(2):
            single = gradient(*(sample[i] for sample in samples))
            for one, other in zip(batched, single, strict=True):
                torch.testing.assert_close(one[i], other, equal_nan=True)

    def test_forward_mode_of_vmap_equals_a_loop(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        samples = tuple(torch.stack([tensor.detach(), tensor.detach() * 0.5 + 0.2]) for tensor in inputs)

        def tangent(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Tensor:
            return torch.func.jvp(function, arguments, tuple(map(torch.ones_like, arguments)))[1]

        batched = tangent(torch.vmap(partial(call, ours)), samples)
        for i in range(2):
            single = tangent(partial(call, ours), tuple(sample[i] for sample in samples))
            torch.testing.assert_close(batched[i], single, equal_nan=True)

    def test_hessians_of_both_modes_equal_torchs(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        first, *others = (tensor.detach() for tensor in inputs)
        theirs = torchs_hessian(call, first, others)
        for hessian in (torch.func.hessian, lambda loss: torch.func.jacfwd(torch.func.jacfwd(loss))):
            mine = hessian(lambda x: call(ours, x, *others).sum())(first)
            torch.testing.assert_close(mine, theirs, equal_nan=True)

    @pytest.mark.every_nth_case(12)
    def test_compiles_without_a_graph_break(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float32)
        compiled = torch.compile(lambda *tensors: call(ours, *tensors).sum() * 2, fullgraph=True, backend="aot_eager")
        expected = torch.autograd.grad(call(ours, *inputs).sum() * 2, inputs)
        torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected, equal_nan=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), call(ours, *inputs).sum() * 2, equal_nan=True)

    @pytest.mark.every_nth_case(48)
    def test_a_transform_inside_a_compiled_function_equals_one_outside(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        first, *others = (tensor.detach() for tensor in inputs)
        samples = torch.stack([first, first * 0.5 + 0.2])

        def loss(tensor: Tensor) -> Tensor:
            return call(ours, tensor, *others).sum()

        def norm_of_gradient(tensor: Tensor) -> Tensor:
            return torch.func.grad(loss)(tensor).square().sum()

        transforms: list[Callable[[], Any]] = [
            lambda: torch.func.grad(norm_of_gradient)(first),
            lambda: torch.func.jvp(loss, (first,), (torch.ones_like(first),)),
            lambda: torch.vmap(torch.func.grad(loss))(samples),
        ]
        for transform in transforms:
            compiled = torch.compile(transform, backend="aot_eager")()
            torch.testing.assert_close(compiled, transform(), equal_nan=True)

    def test_saved_tensor_hooks_apply_to_forward_and_every_backward(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)

        def derivatives() -> list[Tensor]:
            gradients = torch.autograd.grad(call(ours, *inputs).sum(), inputs, create_graph=True)
            squares = sum(gradient.square().sum() for gradient in gradients)
            if not squares.requires_grad:
                return list(gradients)
            return [*gradients, *torch.autograd.grad(squares, inputs, allow_unused=True, materialize_grads=True)]

        expected = derivatives()
        with torch.autograd.graph.save_on_cpu():
            results = derivatives()
        torch.testing.assert_close(results, expected, equal_nan=True)

    @pytest.mark.every_nth_case(4)
    def test_make_fx_traces_it(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float64)
        tensors = tuple(tensor.detach() for tensor in inputs)
        traced = make_fx(lambda *tensors: call(ours, *tensors))(*tensors)
        torch.testing.assert_close(traced(*tensors), call(ours, *tensors), equal_nan=True)

    def test_autocast_gives_torchs_dtypes_and_values(self, case: Case) -> None:
        call, inputs = case.prepare(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = loss_and_gradients(call, ours, inputs)
            expected = loss_and_gradients(call, torchs.functional, inputs)
        for result, theirs in zip(results, expected, strict=True):
            assert result.dtype == theirs.dtype
            torch.testing.assert_close(result, theirs, rtol=2e-2, atol=2e-2, equal_nan=True)


def outcome(function: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[Any, ...]:
    """Return a call's result and gradients, or its exception and where it was raised, and its warnings."""
    for tensor in inputs:
        tensor.grad = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function()
            if result.requires_grad:
                result.sum().backward()
        except Exception as error:
            return "raised", type(error), str(error).splitlines()[0], _categories(caught)
    return "returned", result.detach(), [tensor.grad for tensor in inputs], _categories(caught)


def _categories(caught: list[warnings.WarningMessage]) -> list[type[Warning]]:
    return [warning.category for warning in caught]


def assert_same_outcome(mine: tuple[Any, ...], theirs: tuple[Any, ...], rtol: float, atol: float) -> None:
    """Compare two outcomes: values within the tolerance, everything else exactly."""
    assert mine[0] == theirs[0], (mine, theirs)
    if mine[0] == "raised":
        assert mine[1:] == theirs[1:]
        return
    torch.testing.assert_close(mine[1:3], theirs[1:3], rtol=rtol, atol=atol, equal_nan=True)
    assert mine[3] == theirs[3]
