"""Register a CANN operator as a PyTorch operator that runs, and is differentiable, on every device."""

import inspect
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._autograd.derivatives import (
    any_differentiated,
    as_tuple,
    has_tangent,
    in_functorch_transform,
    is_dual_in_graph,
    raw_function,
)
from torch_aclnn_ops._autograd.eager_or_compiled import EagerOrCompiled
from torch_aclnn_ops._call_log import Implementation, is_logging, log_call
from torch_aclnn_ops._checks import check_device, describe, why_not_chip, why_not_rank
from torch_aclnn_ops._extension import EVERY_CHIP
from torch_aclnn_ops._tensors import without_autocast
from torch_aclnn_ops._torch_compat.private import (
    AutoDispatchBelowAutograd,
    after_autograd_keyset,
    arguments_of,
    in_dispatch_mode,
)
from torch_aclnn_ops._torch_compat.public import register_vmap

import torch
from torch import Tensor

Kernel = Callable[..., Any]
# Takes a chip family and all arguments of a schema; returns why CANN's operator does not support them, as explain()
# shows it, or None.
Limits = Callable[..., str | None]

NAMESPACE = "torch_aclnn_ops"
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a Tensor"),
    "Optional[Tensor]": ((Tensor, type(None)), "None or a Tensor"),
    "int": ((int, Integral, torch.SymInt), "an int"),
    "float": ((float, Real, torch.SymFloat), "a number"),
    "bool": ((bool, Integral, torch.SymBool), "a bool"),
}
_library = torch.library.Library(NAMESPACE, "DEF")


class RawOperator:
    """A ``torch.ops.torch_aclnn_ops`` operator with its PyTorch implementation and its derivatives.

    The mathematics of an operator is defined once, by its formula. The kernel for every device, the batching rule and
    all derivatives are derived from it, so they cannot disagree. An in-place operator does not support autograd and
    raises instead.

    The callables below receive all arguments of the schema, by position.

    Args:
        schema: The operator's schema, without namespace.
        cann: The name of the CANN operator.
        limits: Returns why the CANN operator does not support the arguments on a chip family, or ``None``.
        chips: The chip families that provide the CANN operator.
        check: Raises for invalid arguments. It uses dtypes and shapes only, so it also runs on fake tensors.
        formula: The operator in differentiable PyTorch calls, for any device and floating-point dtype.
        fake: Creates outputs with the right shapes and dtypes.
        check_values: Raises for invalid values; runs on real tensors only.
        cpu: Replaces the formula on the CPU: the same values in less time.
    """

    def __init__(
        self,
        schema: str,
        *,
        cann: str,
        limits: Limits,
        chips: Collection[str] = EVERY_CHIP,
        check: Kernel,
        formula: Kernel,
        fake: Kernel,
        check_values: Kernel | None = None,
        cpu: Kernel | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.cann = cann
        self.formula = without_autocast(formula)
        self.has_cpu_kernel = cpu is not None
        self._limits = limits
        self._chips = chips
        self._check_shapes = check
        self._check_values = check_values
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        arguments = arguments_of(self.overload)
        self._names = [one.name for one in arguments]
        self._defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
        self._positional = sum(not one.kwarg_only for one in arguments)
        self._types = [(one.name, *_TYPES[str(one.type)]) for one in arguments]
        self._written = [one.alias_info is not None and one.alias_info.is_write for one in arguments]
        self.is_mutable = any(self._written)
        self._kernel = self._checked(self.formula)
        # Autocast does not affect any of the PyTorch kernels that cpu calls.
        self._cpu = cpu or self.formula
        _library.impl(self.name, self._from_dispatcher(self._kernel), "CompositeExplicitAutograd")
        if cpu is not None:
            _library.impl(self.name, self._from_dispatcher(self._checked(self._cpu)), "CPU")
        torch.library.register_fake(
            self.overload,
            self._from_dispatcher(self._checked(fake, values=False)),
            lib=_library,
        )
        register_vmap(self.overload, self._call_per_sample, lib=_library)
        if not self.is_mutable:
            self._differentiable = self._with_derivatives(self.run)
            self._of_direct_call = self._with_derivatives(self._run_or_raise)
        _library.impl(self.name, self._autograd, "Autograd", with_keyset=True)
        _extension.register(self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the operator; it is differentiable to any order.

        On an NPU it raises for arguments that the CANN operator does not support, like ``torch.ops.torch_aclnn_ops``.
        """
        if kwargs or len(args) != len(self._names):
            args = self.complete(args, kwargs)
        first = args[0]
        if is_logging() and isinstance(first, Tensor) and first.device.type == "npu":
            log_call(self.name, Implementation.CANN, lambda: self.cann)
        if in_functorch_transform() and not torch.compiler.is_compiling() and not self.is_mutable:
            return self._of_direct_call(*args)
        if not isinstance(first, Tensor) or first.is_cpu:
            self.check(args, True)
            if not self.is_mutable:
                return self.apply(*args)
        return self._launch(*args)

    def apply(self, *args: Any) -> Any:
        """Call the differentiable operator with all arguments, already checked, in schema order."""
        if not torch.compiler.is_compiling() and (in_functorch_transform() or any_differentiated(args)):
            return self._differentiable(*args)
        return self.run(*args)

    def run(self, *args: Any) -> Any:
        """Call the operator without autograd, falling back to PyTorch if the CANN operator does not support the call.

        Args:
            *args: All arguments, already checked, in schema order.
        """
        if args[0].is_cpu:
            if torch.compiler.is_compiling() or in_functorch_transform() or in_dispatch_mode():
                return self.dispatch(*args)
            if is_logging():
                implementation = Implementation.TORCH if self.has_cpu_kernel else Implementation.FALLBACK
                log_call(self.name, implementation, lambda: "the tensors are on cpu")
            return self._cpu(*args)
        reason = self.why_not_cann(*args) if args[0].device.type == "npu" else None
        if reason is None:
            if is_logging() and args[0].device.type == "npu":
                log_call(self.name, Implementation.CANN, lambda: self.cann)
            return self._launch(*args)
        return self.fall_back(reason, *args)

    def _run_or_raise(self, *args: Any) -> Any:
        """Call the operator without autograd; raise if the CANN operator does not support the call."""
        return self._launch(*args) if args[0].device.type == "npu" else self.run(*args)

    def _with_derivatives(self, run: Kernel) -> EagerOrCompiled:
        function = raw_function(self.name, run, self.formula, self._vmap_formula)
        return EagerOrCompiled(function, self._kernel, run)

    def fall_back(self, reason: str, *args: Any) -> Any:
        """Compute a call of :meth:`run` with PyTorch, and log the reason."""
        log_call(self.name, Implementation.FALLBACK, lambda: reason)
        _extension.check_queue(self.name)
        return self._kernel(*args)

    def _launch(self, *args: Any) -> Any:
        """Call the extension's own entry, which takes less time than the dispatcher; Dynamo cannot trace it."""
        entry = None if torch.compiler.is_compiling() else _extension.entries.get(self.name)
        return self.dispatch(*args) if entry is None else entry(*args)

    def dispatch(self, *args: Any) -> Any:
        """Call the operator through PyTorch's dispatcher with all arguments in schema order."""
        by_name = zip(self._names[self._positional :], args[self._positional :], strict=True)
        return self.overload(*args[: self._positional], **dict(by_name))

    def why_not_cann(self, *args: Any) -> str | None:
        """Return why the CANN operator does not support these NPU arguments, or ``None`` if it does.

        Arguments that are invalid on every device may also give a reason: the fallback raises the same error for them.
        """
        reason = _extension.why_without(self.name)
        soc = _extension.soc()
        if reason is not None or soc is None:  # on a chip newer than this package, CANN decides
            return reason
        return why_not_chip(soc, self._chips) or why_not_rank(self._names, args) or self._limits(soc, *args)

    def check_chip(self, args: tuple[Any, ...]) -> None:
        """Raise if the chip does not provide the operator, or if the arguments are invalid on every device."""
        soc = _extension.soc()
        reason = None if soc is None else why_not_chip(soc, self._chips)
        if reason is not None:
            self.check(args, False)
            raise NotImplementedError(f"{self.name}: {reason}; drop-in functions and the CPU fall back to PyTorch")

    def why_not_dtype(self, dtype: torch.dtype) -> str | None:
        """Return why CANN's operator does not support matrices of this dtype, or ``None`` if it does."""
        example = torch.empty(256, 256, dtype=dtype, device="cpu")
        return self.why_not_cann(*[example if types == (Tensor,) else None for _, types, _ in self._types])

    def why_not_this_chip(self) -> str | None:
        """Return why CANN's operator is not supported on this chip, or ``None`` if it is."""
        # An operator supports at least one of these dtypes, if any.
        reasons = list(map(self.why_not_dtype, (torch.float16, torch.float32)))
        return None if None in reasons else reasons[-1]

    def check(self, args: tuple[Any, ...], values: bool) -> None:
        """Check types, devices, dtypes and shapes of the arguments, and their values if ``values`` is true."""
        for value, (name, types, accepted) in zip(args, self._types, strict=True):
            if not isinstance(value, types):
                raise TypeError(f"{self.name}: {name} must be {accepted}, but it is {describe(value)}")
        check_device(self.name, self._names, args)
        self._check_shapes(*args)
        if values and self._check_values is not None:
            self._check_values(*args)

    def complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in schema order; raise ``TypeError`` for missing or unexpected ones."""
        if not kwargs and len(args) == len(self._names):
            return args
        missing = self._names[len(args) :]
        values = {**self._defaults, **kwargs}
        is_known = len(kwargs) == sum(name in kwargs for name in missing)
        if len(args) > self._positional or not is_known or any(name not in values for name in missing):
            self._raise_signature_error(args, kwargs)
        return (*args, *(values[name] for name in missing))

    def _raise_signature_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        no_default = inspect.Parameter.empty
        parameters = [
            inspect.Parameter(name, kinds[i >= self._positional], default=self._defaults.get(name, no_default))
            for i, name in enumerate(self._names)
        ]
        try:
            inspect.Signature(parameters).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None

    def _checked(self, kernel: Kernel, values: bool = True) -> Kernel:
        def checked_kernel(*args: Any) -> Any:
            self.check(args, values)
            outputs = kernel(*args)
            if isinstance(outputs, tuple):
                return tuple(output.contiguous() for output in outputs)
            # The fake kernel returns contiguous tensors, and compiled code relies on that.
            return outputs if outputs is None else outputs.contiguous()

        return checked_kernel

    def _from_dispatcher(self, kernel: Kernel) -> Kernel:
        def dispatcher_entry(*args: Any, **kwargs: Any) -> Any:
            return kernel(*self.complete(args, kwargs))

        return dispatcher_entry

    def _call_per_sample(
        self, info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Batching rule of a direct call: a loop, because ``torch.vmap`` of the formula cannot nest inside the rule."""
        for name, is_written, value, dim in zip(self._names, self._written, args, in_dims, strict=False):
            if is_written and isinstance(value, Tensor) and dim is None:
                raise ValueError(f"{self.name}: {name} must be batched by vmap, because every sample writes to it")
        results = [self.overload(*sample, **kwargs) for sample in _samples(info, in_dims, args)]
        if results[0] is None:
            return None, None
        batched = tuple(
            torch.stack(outputs)[: info.batch_size] for outputs in zip(*map(as_tuple, results), strict=True)
        )
        return (batched, (0,) * len(batched)) if isinstance(results[0], tuple) else (batched[0], 0)

    def _vmap_formula(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Batching rule of a call from another Function: one vectorized call of the formula."""
        if self._check_values is not None:
            for sample in _samples(info, in_dims, args):
                self._check_values(*sample)
        outputs = torch.vmap(self._checked(self.formula, values=False), in_dims)(*args)
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

    def _autograd(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Autograd kernel of a direct call to the operator."""
        complete = self.complete(args, kwargs)
        if self.is_mutable:
            self._check_no_derivatives(complete)
        elif any_differentiated(complete) or any(map(is_dual_in_graph, complete)):
            self.check(complete, True)
            if in_dispatch_mode() and not in_functorch_transform() and any(map(has_tangent, complete)):
                # The graph that is traced would enter the dual level without Python's counter of it.
                raise RuntimeError(
                    f"{self.name}: a traced call must not have tangents of a dual level; use torch.func.jvp instead"
                )
            # Below the dispatcher, torch cannot apply a Function in a transform, and nothing is left to Dynamo.
            return (self.formula if in_functorch_transform() else self._of_direct_call.eager)(*complete)
        with AutoDispatchBelowAutograd():
            return self.overload.redispatch(after_autograd_keyset & keyset, *args, **kwargs)

    def _check_no_derivatives(self, args: tuple[Any, ...]) -> None:
        for name, value in zip(self._names, args, strict=True):
            if any_differentiated([value]) or is_dual_in_graph(value):
                raise RuntimeError(
                    f"{self.name}: {name} must not require grad or have a tangent, because the operator writes to its"
                    " arguments and has no derivative; call it under torch.no_grad() or on a detached tensor"
                )


def _samples(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of each sample; for an empty batch, one sample of zeros, to infer the output shapes."""
    if info.batch_size == 0:
        blank = zip(args, in_dims, strict=True)
        return [tuple(arg if dim is None else arg.new_zeros(arg.movedim(dim, 0).shape[1:]) for arg, dim in blank)]
    return [
        tuple(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True))
        for i in range(info.batch_size)
    ]
