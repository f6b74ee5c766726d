"""Make one CANN operator a PyTorch operator that runs, and can be differentiated, on every device."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops.ops._numerics import without_autocast
from torch_aclnn_ops.ops._paths import why_formula

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
        self._check = check
        self._check_values = check_values
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        self._defaults = {argument.name: argument.default_value for argument in self.overload._schema.arguments}
        self._kernel = self._checked(without_autocast(kernel or formula))
        _library.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        if cpu is not None:
            _library.impl(self.name, self._checked(without_autocast(cpu)), "CPU")
        torch.library.register_fake(self.overload, self._checked(fake, values=False), lib=_library)
        torch.library.register_vmap(self.overload, self._call_per_sample, lib=_library)
        self.is_mutable = bool(self.overload._schema.is_mutable)
        if self.is_mutable:
            _library.impl(self.name, self._refuse_autograd, "Autograd")
        else:
            self._function = _make_function(self)
            torch.library.register_autograd(
                self.overload,
                self._function.backward,
                setup_context=self._function.setup_context,
                lib=_library,
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, with every derivative that autograd may ask for.

        In eager mode this is an ``autograd.Function`` with ``jvp``. Dynamo traces neither ``jvp`` nor a Function inside
        the backward of another, so a compiled call goes to the operator, which has an autograd kernel of its own.
        """
        if self.is_mutable or torch.compiler.is_compiling():
            return self.run(*args, **kwargs)
        return self._function.apply(*self.bind(args, kwargs).values())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, or compute its formula where the device has no kernel for these arguments."""
        arguments = self.bind(args, kwargs)
        if why_formula(self.name, arguments) is None:
            return self.overload(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._checked(self.formula)(**arguments)
        if self.is_mutable:
            self._refuse_derivatives(arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return self._kernel(**arguments)

    def check(self, args: tuple[Any, ...], values: bool) -> None:
        """Raise where the arguments break the operator's rules: those for dtypes and shapes, or those for values."""
        arguments = self.bind(args, {})
        self._check(**arguments)
        if values and self._check_values is not None:
            self._check_values(**arguments)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the value of each argument of the schema by its name, in order."""
        return {**self._defaults, **dict(zip(self._defaults, args, strict=False)), **kwargs}

    def _checked(self, kernel: Kernel, values: bool = True) -> Kernel:
        def checked_kernel(*args: Any, **kwargs: Any) -> Any:
            arguments = self.bind(args, kwargs)
            self._check(**arguments)
            if values and self._check_values is not None:
                self._check_values(**arguments)
            return kernel(**arguments)

        return checked_kernel

    def _call_per_sample(
        self, info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Batch a direct call to the operator; ``torch.vmap`` of the formula cannot nest in such a rule."""
        for argument, value, dim in zip(self.overload._schema.arguments, args, in_dims, strict=False):
            if argument.alias_info is not None and isinstance(value, Tensor) and dim is None:
                raise ValueError(
                    f"{self.name}: {argument.name} must be batched by vmap, because every sample writes to it"
                )
        samples = [self.overload(*sample, **kwargs) for sample in _samples(info, in_dims, args)]
        if samples[0] is None:
            return None, None
        if isinstance(samples[0], tuple):
            return tuple(torch.stack(outputs) for outputs in zip(*samples, strict=True)), (0,) * len(samples[0])
        return torch.stack(samples), 0

    def _vmap_formula(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Batch a call from another Function: one run of the formula for all samples."""
        if self._check_values is not None:
            for sample in _samples(info, in_dims, args):
                self._check_values(**self.bind(sample, {}))
        outputs = torch.vmap(self._checked(self.formula, values=False), in_dims)(*args)
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

    def _refuse_autograd(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_derivatives(self.bind(args, kwargs))
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args, **kwargs)

    def _refuse_derivatives(self, arguments: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            for name, value in arguments.items():
                if isinstance(value, Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"{self.name}: {name} must not require grad, because the operator writes to its arguments and"
                        " has no derivative; call it under torch.no_grad() or on a detached tensor"
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
            ctx.mark_non_differentiable(*(out for out in _as_tuple(output) if not out.is_floating_point()))

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
            positions = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
            _, vjp, differentiable = _vjp_of_formula(operator, ctx, positions)
            grads = iter(vjp(tuple(grad for grad, used in zip(grad_outputs, differentiable, strict=True) if used)))
            return tuple(next(grads) if needed else None for needed in ctx.needs_input_grad)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
            positions = [i for i, tangent in enumerate(tangents) if tangent is not None]
            outputs, vjp, differentiable = _vjp_of_formula(operator, ctx, positions)
            # vjp maps a cotangent u to J^T u. It is linear, so its own vjp maps a tangent t to J t, whatever u is:
            # a jvp without nested forward mode, which PyTorch has only inside torch.func.
            _, jvp, *_ = torch.func.vjp(vjp, tuple(torch.zeros_like(out) for out in outputs))
            output_tangents = iter(jvp(tuple(tangents[i] for i in positions))[0])
            by_output = tuple(next(output_tangents) if used else None for used in differentiable)
            return by_output if len(by_output) > 1 else by_output[0]

    RawFunction.__name__ = RawFunction.__qualname__ = f"RawFunction_{operator.name}"
    return RawFunction


def _vjp_of_formula(
    operator: RawOperator, ctx: Any, positions: list[int]
) -> tuple[tuple[Tensor, ...], Kernel, list[bool]]:
    """Differentiate the formula by the arguments at ``positions``.

    Returns the outputs that have a derivative, their vjp, and for every output whether it is one of them.
    """
    saved = [other if tensor is None else tensor for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
    differentiable: list[bool] = []

    def formula(*values: Tensor) -> tuple[Tensor, ...]:
        args = list(saved)
        for position, value in zip(positions, values, strict=True):
            args[position] = value
        outputs = _as_tuple(operator.formula(**operator.bind(tuple(args), {})))
        differentiable[:] = [out.is_floating_point() for out in outputs]
        return tuple(out for out in outputs if out.is_floating_point())

    outputs, vjp, *_ = torch.func.vjp(formula, *(saved[position] for position in positions))
    return outputs, vjp, differentiable


def _samples(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [
        tuple(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True))
        for i in range(info.batch_size)
    ]


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
