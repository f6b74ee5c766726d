"""Make one CANN operator a PyTorch operator that runs, and can be differentiated, on every device."""

import inspect
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from torch_aclnn_ops._torch_compat import (
    AutoDispatchBelowAutograd,
    DispatchKeySet,
    after_autograd_keyset,
    register_vmap,
    schema_of,
)
from torch_aclnn_ops.ops._checks import check_device
from torch_aclnn_ops.ops._derivatives import in_nested_forward_mode, is_differentiated, jvp, vjp
from torch_aclnn_ops.ops._numerics import without_autocast
from torch_aclnn_ops.ops._paths import note_kernel, why_formula

import torch
from torch import Tensor

Kernel = Callable[..., Any]

NAMESPACE = "torch_aclnn_ops"
_library = torch.library.Library(NAMESPACE, "DEF")


class RawOperator:
    """A ``torch.ops.torch_aclnn_ops`` operator together with its formula and its derivatives.

    The mathematics of an operator stands in one place, its formula. The kernel for every device, the batching rule and
    all derivatives are made from it, so that no derivative can disagree with its function. An operator that writes to
    its arguments refuses autograd instead.

    The functions below receive all arguments of the schema by name; they name those they use and take the rest as
    ``**_``.

    Args:
        schema: the operator's schema, without namespace.
        check: raises where an argument does not fit. It sees dtypes and shapes only, so it runs on fake tensors too.
        formula: the operator in differentiable torch calls, for any device and floating-point dtype.
        fake: makes outputs of the right shapes and dtypes.
        check_values: raises where a value does not fit; runs on real tensors only.
        kernel: what runs instead of the formula, on any device: the same values in less memory.
        cpu: what runs on the CPU: the same values in less time.
    """

    def __init__(
        self,
        schema: str,
        *,
        check: Kernel,
        formula: Kernel,
        fake: Kernel,
        check_values: Kernel | None = None,
        kernel: Kernel | None = None,
        cpu: Kernel | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.formula = without_autocast(formula)
        self.has_cpu_kernel = cpu is not None
        self._check_shapes = check
        self._check_values = check_values
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        schema_of_overload = schema_of(self.overload)
        self._arguments = schema_of_overload.arguments
        self._required_tensors = [argument.name for argument in self._arguments if str(argument.type) == "Tensor"]
        self._signature = _signature_of(self._arguments)
        self._defaults = {name: parameter.default for name, parameter in self._signature.parameters.items()}
        self._names = list(self._defaults)
        self._kernel = self._checked(without_autocast(kernel or formula))
        _library.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        if cpu is not None:
            _library.impl(self.name, self._checked(without_autocast(cpu)), "CPU")
        noting_fake = self._checked(self._noting_the_path(fake), values=False)
        torch.library.register_fake(self.overload, noting_fake, lib=_library)
        register_vmap(self.overload, self._call_per_sample, lib=_library)
        self.is_mutable = bool(schema_of_overload.is_mutable)
        if not self.is_mutable:
            self._function = _make_function(self)
        _library.impl(self.name, self._autograd, "Autograd", with_keyset=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, with every derivative that autograd may ask for.

        In eager mode this is an ``autograd.Function``, which functorch's transforms can see. Dynamo does not trace a
        Function inside the backward of another, so a compiled call goes to the operator, whose autograd kernel applies
        the Function.
        """
        if torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        try:
            given = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        if self.is_mutable:
            return self.run(*given.args, **given.kwargs)
        arguments = self.bind((), given.arguments)
        if in_nested_forward_mode():
            return self._checked(self.formula)(**arguments)
        return self._function.apply(*arguments.values())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, or compute its formula where the device has no kernel for these arguments."""
        arguments = self.bind(args, kwargs)
        if why_formula(self.name, arguments) is None:
            return self.overload(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._checked(self.formula)(**arguments)
        if self.is_mutable:
            self._refuse_derivatives(arguments)
        with AutoDispatchBelowAutograd():
            return self._kernel(**arguments)

    def check(self, args: tuple[Any, ...], values: bool) -> None:
        """Raise where the arguments break the operator's rules: those for dtypes and shapes, or those for values."""
        self._check(self.bind(args, {}), values)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the value of each argument of the schema by its name, in order; the arguments must fit the schema."""
        given = zip(self._names[: len(args)], args, strict=True)  # Dynamo of 2.9 takes strict=False for True
        return {**self._defaults, **dict(given), **kwargs}

    def _checked(self, kernel: Kernel, values: bool = True) -> Kernel:
        def checked_kernel(*args: Any, **kwargs: Any) -> Any:
            arguments = self.bind(args, kwargs)
            self._check(arguments, values)
            outputs = kernel(**arguments)
            if isinstance(outputs, tuple):
                return tuple(output.contiguous() for output in outputs)
            # The fake kernel makes contiguous tensors, and compiled code relies on that.
            return outputs if outputs is None else outputs.contiguous()

        return checked_kernel

    def _check(self, arguments: dict[str, Any], values: bool) -> None:
        for name in self._required_tensors:
            if arguments[name] is None:
                raise TypeError(f"{self.name}: {name} must be a Tensor, but it is None")
        check_device(self.name, arguments)
        self._check_shapes(**arguments)
        if values and self._check_values is not None:
            self._check_values(**arguments)

    def _noting_the_path(self, fake: Kernel) -> Kernel:
        def noting(**arguments: Any) -> Any:
            note_kernel(self.name, arguments)
            return fake(**arguments)

        return noting

    def _call_per_sample(
        self, info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Batch a direct call to the operator; ``torch.vmap`` of the formula cannot nest in such a rule."""
        for argument, value, dim in zip(self._arguments, args, in_dims, strict=False):
            if argument.alias_info is not None and isinstance(value, Tensor) and dim is None:
                raise ValueError(
                    f"{self.name}: {argument.name} must be batched by vmap, because every sample writes to it"
                )
        results = [self.overload(*sample, **kwargs) for sample in _samples(info, in_dims, args)]
        if results[0] is None:
            return None, None
        batched = tuple(
            torch.stack(outputs)[: info.batch_size] for outputs in zip(*map(_as_tuple, results), strict=True)
        )
        return (batched, (0,) * len(batched)) if isinstance(results[0], tuple) else (batched[0], 0)

    def _vmap_formula(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Batch a call from another Function: one run of the formula for all samples."""
        if self._check_values is not None:
            for sample in _samples(info, in_dims, args):
                self._check_values(**self.bind(sample, {}))
        outputs = torch.vmap(self._checked(self.formula, values=False), in_dims)(*args)
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

    def _autograd(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bind(args, kwargs)
        if self.is_mutable:
            self._refuse_derivatives(arguments)
        elif any(map(is_differentiated, arguments.values())):
            return self._function.apply(*arguments.values())
        with AutoDispatchBelowAutograd():
            return self.overload.redispatch(keyset & after_autograd_keyset, *args, **kwargs)

    def _refuse_derivatives(self, arguments: dict[str, Any]) -> None:
        for name, value in arguments.items():
            if is_differentiated(value):
                raise RuntimeError(
                    f"{self.name}: {name} must not require grad or have a tangent, because the operator writes to its"
                    " arguments and has no derivative; call it under torch.no_grad() or on a detached tensor"
                )


def _make_function(operator: RawOperator) -> Any:
    """Make the ``autograd.Function`` of an operator from its formula."""

    class RawFunction(torch.autograd.Function):
        vmap = staticmethod(operator._vmap_formula)

        @staticmethod
        def forward(*args: Any) -> Any:
            return operator.run(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            tensors = [arg if isinstance(arg, Tensor) else None for arg in inputs]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.others = [None if isinstance(arg, Tensor) else arg for arg in inputs]
            ctx.differentiable = [out.is_floating_point() for out in _as_tuple(output)]
            ctx.mark_non_differentiable(*(out for out in _as_tuple(output) if not out.is_floating_point()))

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
            formula, primals = _formula_of(operator, ctx, ctx.needs_input_grad)
            _, pull_back = vjp(formula, *primals)
            used = (
                grad for grad, differentiable in zip(grad_outputs, ctx.differentiable, strict=True) if differentiable
            )
            return _scatter(ctx.needs_input_grad, pull_back(*used))

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
            formula, primals = _formula_of(operator, ctx, [tangent is not None for tangent in tangents])
            given = [tangent for tangent in tangents if tangent is not None]
            by_output = _scatter(ctx.differentiable, jvp(formula, primals, given))
            return by_output if len(by_output) > 1 else by_output[0]

    RawFunction.__name__ = RawFunction.__qualname__ = f"RawFunction_{operator.name}"
    return RawFunction


def _formula_of(
    operator: RawOperator, ctx: Any, selectors: Sequence[bool]
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Return the formula as a function of the selected arguments only, with its floating-point outputs, and these."""
    saved = [other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)]

    def formula(*values: Tensor) -> tuple[Tensor, ...]:
        replaced = (
            value if selected else argument
            for value, selected, argument in zip(_scatter(selectors, values), selectors, saved, strict=True)
        )
        outputs = _as_tuple(operator.formula(**operator.bind(tuple(replaced), {})))
        return tuple(out for out in outputs if out.is_floating_point())

    return formula, list(compress(saved, selectors))


def _scatter(selectors: Sequence[bool], values: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Put the values at the selected places, in order, and ``None`` at the others."""
    remaining = iter(values)
    return tuple(next(remaining) if selected else None for selected in selectors)


def _signature_of(arguments: Sequence[Any]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in arguments
        ]
    )


def _samples(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of each sample; for a batch of no samples, one of zeros, which tells the outputs' shapes."""
    if info.batch_size == 0:
        blank = zip(args, in_dims, strict=True)
        return [tuple(arg if dim is None else arg.new_zeros(arg.movedim(dim, 0).shape[1:]) for arg, dim in blank)]
    return [
        tuple(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True))
        for i in range(info.batch_size)
    ]


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
