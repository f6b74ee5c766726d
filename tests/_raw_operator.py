"""The contract of every raw operator, as tests over tables of samples and error inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_aclnn_ops._autograd.raw_operator import RawOperator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests._contract import HALF_DTYPES, Maker

# Values that no argument accepts, by their names in errors, except that some arguments accept integers or None.
NO_TENSORS = {"None": None, "3": 3, "0.5": 0.5, "'x'": "x", "of type list": [1.0], "of type ndarray": np.ones((8, 4))}
# The accepted ones, by the kind of an argument's type in the schema.
_ACCEPTED = {
    "TensorType": (),
    "OptionalType": ("None",),
    "IntType": ("3",),
    "BoolType": ("3",),
    "FloatType": ("3", "0.5"),
}


@dataclass(frozen=True)
class Sample:
    """Arguments that an operator accepts; ``differentiable`` are the positions that its tests differentiate by."""

    name: str
    arguments: Callable[[Maker], tuple[Any, ...]]
    differentiable: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class ErrorInput:
    """Invalid arguments of an operator, with the exception and a pattern of its message."""

    name: str
    arguments: Callable[[Maker], tuple[Any, ...]]
    exception: type[Exception]
    sentence: str


def error_inputs(
    make: Callable[[Maker], tuple[Any, ...]], table: dict[str, tuple[Any, Callable[[Any], Any], type[Exception], str]]
) -> list[ErrorInput]:
    """Return valid arguments with changes: name: (their positions, how, exception, sentence)."""

    def changed(maker: Maker, positions: int | tuple[int, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
        chosen = (positions,) if isinstance(positions, int) else positions
        return tuple(change(one) if place in chosen else one for place, one in enumerate(make(maker)))

    return [
        ErrorInput(name, partial(changed, positions=positions, change=change), error, sentence)
        for name, (positions, change, error, sentence) in table.items()
    ]


def flat(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _copy(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in arguments)


class RawOperatorContract:
    """The contract; a subclass sets the operator and its tables."""

    OPERATOR: RawOperator
    SAMPLES: list[Sample]
    ERROR_INPUTS: list[ErrorInput]
    ROUNDINGS = 8.0  # allowed difference from the float64 formula, in roundings of the largest value
    CANN_DTYPES: tuple[torch.dtype, ...] = (torch.float32, *HALF_DTYPES)
    CANN_SAMPLES: tuple[Sample, ...] = ()  # further samples on an NPU

    @staticmethod
    def fits_cann(*arguments: Any) -> bool:
        """Return whether CANN supports a sample."""
        return all(arg.dim() <= 8 for arg in arguments if isinstance(arg, Tensor))

    @classmethod
    def assert_right(cls, results: Any, arguments: tuple[Any, ...], dtype: torch.dtype, roundings: float) -> None:
        """Compare results, on any device, with those of the formula in float64."""
        wide = tuple(arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in arguments)
        truths = flat(cls.OPERATOR.formula(*cls.OPERATOR.complete(_copy(wide), {})))
        for result, truth in zip(flat(results), truths, strict=True):
            assert result.shape == truth.shape
            if not truth.is_floating_point():
                assert torch.equal(result.cpu(), truth)
            elif truth.numel():
                allowed = roundings * torch.finfo(dtype).eps * truth.abs().max()
                assert (result.cpu().double() - truth).abs().max() <= allowed

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_DTYPES])
    def test_kernel_equals_the_formula_in_float64(self, sample: Sample, dtype: torch.dtype) -> None:
        arguments = sample.arguments(Maker(dtype))
        self.assert_right(self.OPERATOR.overload(*_copy(arguments)), arguments, dtype, self.ROUNDINGS)

    @pytest.mark.every_nth_case(3)
    def test_opcheck_passes(self, sample: Sample) -> None:
        arguments = sample.arguments(Maker(torch.float32))
        if not self.OPERATOR.is_mutable:
            for position in sample.differentiable:
                arguments[position].requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.opcheck(self.OPERATOR.overload, arguments)

    def test_derivatives_are_right(self, sample: Sample) -> None:
        arguments = list(sample.arguments(Maker(torch.float64)))
        if self.OPERATOR.is_mutable:
            arguments[sample.differentiable[0]].requires_grad_()
            with pytest.raises(RuntimeError, match="writes to its arguments and has no derivative"):
                self.OPERATOR(*arguments)
            return

        def call(*tensors: Tensor) -> list[Tensor]:
            replaced = list(arguments)
            for position, tensor in zip(sample.differentiable, tensors, strict=True):
                replaced[position] = tensor
            return [out for out in flat(self.OPERATOR(*replaced)) if out.is_floating_point()]

        inputs = tuple(arguments[position].requires_grad_() for position in sample.differentiable)
        options = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
        assert torch.autograd.gradcheck(call, inputs, **options)
        assert torch.autograd.gradgradcheck(call, inputs, check_batched_grad=True)

    def test_a_direct_call_supports_forward_mode_or_raises(self, sample: Sample) -> None:
        value, total = self._total(sample, self.OPERATOR.overload)
        _, expected = self._total(sample, self._formula)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            if self.OPERATOR.is_mutable:
                with pytest.raises(RuntimeError, match="must not require grad or have a tangent"):
                    total(dual)
                return
            # A missing tangent is a tangent of zeros.
            tangents = [forward_ad.unpack_dual(each(dual) + dual.sum()).tangent for each in (total, expected)]
        torch.testing.assert_close(*tangents)

    @staticmethod
    def _total(sample: Sample, operator: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the argument by which a sample is differentiated, and a scalar function of it."""
        arguments = sample.arguments(Maker(torch.float64))
        position = sample.differentiable[0]

        def total(tensor: Tensor) -> Tensor:
            outputs = flat(operator(*arguments[:position], tensor, *arguments[position + 1 :]))
            return torch.stack([out.cos().sum() for out in outputs if out.is_floating_point()]).sum()

        return arguments[position], total

    def test_transforms_of_a_direct_call_are_those_of_the_formula(self, sample: Sample) -> None:
        value, total = self._total(sample, self.OPERATOR.overload)
        _, expected = self._total(sample, self._formula)
        ones = torch.ones_like(value)
        transforms: list[Callable[[Any], Any]] = [
            lambda f: torch.func.grad(f)(value),
            lambda f: torch.func.jvp(f, (value,), (ones,))[1],
            lambda f: torch.func.jvp(torch.func.grad(f), (value,), (ones,))[1],
            lambda f: torch.vmap(torch.func.grad(f))(torch.stack([value, value * 2])),
            lambda f: torch.func.grad(lambda batch: torch.vmap(f)(batch).sum())(torch.stack([value, value * 2])),
        ]
        for transform in transforms:
            if self.OPERATOR.is_mutable:
                with pytest.raises((RuntimeError, ValueError), match=self.OPERATOR.name):
                    transform(total)
            else:
                torch.testing.assert_close(transform(total), transform(expected))

    @pytest.mark.parametrize("is_overload", [False, True])
    def test_a_compiled_call_has_the_gradient_or_is_refused(self, is_overload: bool) -> None:
        value, total = self._total(self.SAMPLES[0], self.OPERATOR.overload if is_overload else self.OPERATOR)
        compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
        value.requires_grad_()
        if self.OPERATOR.is_mutable:
            with pytest.raises(Exception, match="must not require grad or have a tangent"):
                compiled(value)
        else:
            gradients = [torch.autograd.grad(each(value), value) for each in (compiled, total)]
            torch.testing.assert_close(*gradients)

    def test_a_dual_level_in_compiled_code_is_refused(self) -> None:
        value, total = self._total(self.SAMPLES[0], self.OPERATOR.overload)

        @torch.compile(fullgraph=True, backend="eager")
        def tangent(tensor: Tensor) -> Any:
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(total(forward_ad.make_dual(tensor, tensor.cos())) + tensor.sum()).tangent

        with pytest.raises(Exception, match=f"{self.OPERATOR.name}: .* (dual level|a tangent)"):
            tangent(value)

    def test_a_compiled_tangent_is_right_or_refused(self) -> None:
        value, total = self._total(self.SAMPLES[0], self.OPERATOR.overload)

        def tangent(tensor: Tensor) -> Tensor:  # the sum has a tangent even if the operator's is missing
            return torch.func.jvp(lambda x: total(x) + x.sum(), (tensor,), (tensor.cos(),))[1]

        compiled = torch.compile(tangent, fullgraph=True, backend="aot_eager")
        if self.OPERATOR.is_mutable:
            with pytest.raises(Exception, match="must not require grad or have a tangent"):
                compiled(value)
        else:
            torch.testing.assert_close(compiled(value), tangent(value))

    def _formula(self, *arguments: Any) -> Any:
        return self.OPERATOR.formula(*self.OPERATOR.complete(arguments, {}))

    @pytest.mark.parametrize("change", ["missing", "too many", "unknown", "twice"])
    def test_arguments_that_do_not_match_the_schema_raise(self, change: str) -> None:
        arguments = self.SAMPLES[0].arguments(Maker(torch.float32))
        first = self.OPERATOR.overload._schema.arguments[0].name
        calls = {
            "missing": lambda: self.OPERATOR(*arguments[:1]),
            "too many": lambda: self.OPERATOR(*arguments, *[0] * 20),
            "unknown": lambda: self.OPERATOR(*arguments, colour=1),
            "twice": lambda: self.OPERATOR(*arguments, **{first: arguments[0]}),
        }
        with pytest.raises((TypeError, RuntimeError), match=self.OPERATOR.name):
            calls[change]()

    @pytest.mark.parametrize("described", NO_TENSORS)
    def test_an_argument_of_another_type_raises_with_its_name(self, described: str) -> None:
        arguments = self.SAMPLES[0].arguments(Maker(torch.float32))
        for i, argument in enumerate(self.OPERATOR.overload._schema.arguments[: len(arguments)]):
            if described in _ACCEPTED[argument.type.kind()]:
                continue
            wrong = (*arguments[:i], NO_TENSORS[described], *arguments[i + 1 :])
            sentence = f"^{self.OPERATOR.name}: {argument.name} must be .*, but it is {described}$"
            # An overload passes other values to torch.
            is_none = argument.type.kind() == "TensorType" and described == "None"
            overloads = [self.OPERATOR.overload] if is_none else []
            for operator in (self.OPERATOR, *overloads):
                with pytest.raises(TypeError, match=sentence):
                    operator(*wrong)

    def test_a_tensor_on_another_device_raises_with_its_name(self) -> None:
        arguments = self.SAMPLES[0].arguments(Maker(torch.float32))
        tensors = [i for i, argument in enumerate(arguments) if isinstance(argument, Tensor)]
        for i in tensors[1:]:
            mixed = (*arguments[:i], arguments[i].to("meta"), *arguments[i + 1 :])
            name = self.OPERATOR.overload._schema.arguments[i].name
            sentence = f"{self.OPERATOR.name}: {name} must be on cpu, as .* is, but it is on meta"
            with pytest.raises(RuntimeError, match=sentence):
                self.OPERATOR.overload(*mixed)

    def test_vmap_equals_a_loop(self, sample: Sample) -> None:
        arguments = sample.arguments(Maker(torch.float64))
        position = sample.differentiable[0]
        batch = torch.stack([arguments[position], arguments[position] * 2])

        def call(tensor: Tensor, operator: Any) -> Any:
            copies = _copy(arguments)
            return operator(*copies[:position], tensor, *copies[position + 1 :])

        schema = self.OPERATOR.overload._schema.arguments
        if any(arg.alias_info and isinstance(value, Tensor) for arg, value in zip(schema, arguments, strict=False)):
            with pytest.raises(ValueError, match="must be batched by vmap, because every sample writes to it"):
                torch.vmap(lambda tensor: call(tensor, self.OPERATOR))(batch)
            return
        for operator in (self.OPERATOR, self.OPERATOR.overload):
            batched = flat(torch.vmap(lambda tensor, operator=operator: call(tensor, operator))(batch))
            for i in range(2):
                for one, other in zip(batched, flat(call(batch[i], operator)), strict=True):
                    torch.testing.assert_close(one[i], other)

    def test_vmap_over_an_empty_batch_is_empty(self, sample: Sample) -> None:
        arguments = list(sample.arguments(Maker(torch.float32)))
        floating = [i for i, arg in enumerate(arguments) if isinstance(arg, Tensor) and arg.is_floating_point()]
        outputs = self.OPERATOR.overload(*_copy(tuple(arguments)))
        in_dims: list[int | None] = [None] * len(arguments)
        for i in floating:
            arguments[i], in_dims[i] = arguments[i].new_empty(0, *arguments[i].shape), 0
        batched = torch.vmap(self.OPERATOR.overload, tuple(in_dims))(*arguments)
        for one, other in zip(flat(batched), flat(outputs), strict=True):
            assert (one is None and other is None) or one.shape == (0, *other.shape)

    def test_errors_name_the_argument_its_value_and_what_is_accepted(self, error_input: ErrorInput) -> None:
        arguments = error_input.arguments(Maker(torch.float32))
        with pytest.raises(error_input.exception, match=f"{self.OPERATOR.name}: {error_input.sentence}"):
            self.OPERATOR.overload(*arguments)
        # The next valid call works, so nothing is left half-done.
        self.OPERATOR.overload(*self.SAMPLES[0].arguments(Maker(torch.float32)))
