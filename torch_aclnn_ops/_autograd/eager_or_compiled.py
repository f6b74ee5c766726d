"""Apply an ``autograd.Function`` in eager mode, inside ``torch.func`` transforms and under ``torch.compile``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch_aclnn_ops import _cpu_extension, _extension
from torch_aclnn_ops._autograd.derivatives import (
    any_wrapped,
    in_functorch_transform,
    in_nested_forward_mode,
    is_exporting,
)
from torch_aclnn_ops._call_log import is_logging_in_eager_mode
from torch_aclnn_ops._tensors import DTYPES
from torch_aclnn_ops._torch_compat.private import fast_apply, in_forward_ad

import torch
from torch.autograd import Function


class NativeFunction(NamedTuple):
    """A C++ autograd function of an extension, for ordinary eager calls.

    Attributes:
        name: The function's name.
        why_not_dtype: Returns why the CANN operator it calls does not support a dtype, or ``None``.
        cpu_dtypes: Supported floating-point dtypes on the CPU.
    """

    name: str
    why_not_dtype: Callable[[torch.dtype], str | None]
    cpu_dtypes: Sequence[torch.dtype] = DTYPES


class EagerOrCompiled:
    """Apply the variant of a Function that is differentiable in the current mode.

    ===================================  =======================================================================
    eager, on an NPU or a CPU            ``native``, which falls back to the next row for unsupported arguments
    eager                                a copy whose ``forward`` takes ctx: half the cost of ``setup_context``
    inside ``torch.func``                the Function itself; also for wrapped tensors of an exited transform
    inside a jvp of a jvp                ``formula``: PyTorch treats the tangent of a Function as a constant
    compiled                             ``compiled``, or a copy without ``jvp``, which Dynamo does not support
    compiled, in ``torch.func``          ``formula``: Dynamo treats higher derivatives of a Function as 0
    compiled, in a dual level            ``formula``
    ``torch.export``                     ``formula``: the backward pass of a Function is not exported
    ===================================  =======================================================================

    Args:
        function: A Function with ``forward`` (without ctx), ``setup_context``, ``backward`` and ``jvp``.
        formula: The same function in differentiable PyTorch calls.
        compiled: An operator that compiled code calls instead of the Function.
        native: The same function in C++. It is not used while implementations are logged.
    """

    def __init__(
        self,
        function: type[Function],
        formula: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
        native: NativeFunction | None = None,
    ) -> None:
        self._in_transforms: Callable[..., Any] = function.apply
        self._light: Callable[..., Any] = fast_apply(_with_ctx(function))
        self._compiled: Callable[..., Any] = compiled or _without_jvp(function).apply
        self._formula = formula
        self._has_operator = compiled is not None
        self._native = native
        self._entries: dict[torch.device, Callable[..., Any]] = {}  # of the native function

    def __call__(self, *args: Any) -> Any:
        """Apply the Function."""
        if torch.compiler.is_compiling():
            if self._has_operator or not (in_functorch_transform() or in_forward_ad() or is_exporting()):
                return self._compiled(*args)
            return self._formula(*args)
        if self._native is None or is_logging_in_eager_mode():
            return self.eager(*args)
        device = args[0].device  # device.type builds a string in every call
        entry = self._entries.get(device) or self._make_entry(self._native, device)
        return entry(*args)

    def _make_entry(self, native: NativeFunction, device: torch.device) -> Callable[..., Any]:
        """Return the native function's entry point for a device, which calls ``eager`` for unsupported arguments."""
        if device.type == "cpu":
            entry = _cpu_extension.function(native.name, self.eager, native.cpu_dtypes)
        elif device.type == "npu" and native.name in _extension.functions:
            supported = [dtype for dtype in DTYPES if native.why_not_dtype(dtype) is None]
            entry = _extension.functions[native.name](self.eager, supported)
        else:  # not cached: torch_npu may be imported later
            return self.eager
        self._entries[device] = entry
        return entry

    def eager(self, *args: Any) -> Any:
        """Apply the Function as uncompiled code does."""
        if not in_functorch_transform() and not any_wrapped(args):
            return self._light(*args)
        return self._formula(*args) if in_nested_forward_mode() else self._in_transforms(*args)


def _with_ctx(function: type[Function]) -> type[Function]:
    """Return the Function with a forward that takes the ctx: without setup_context, autograd applies it faster."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    members: dict[str, Any] = {"forward": forward, "backward": function.backward, "jvp": function.jvp}
    return type(function.__name__, (Function,), {name: staticmethod(member) for name, member in members.items()})


def _without_jvp(function: type[Function]) -> type[Function]:
    """Return the Function without its jvp, which Dynamo does not trace."""
    members = {name: member for name, member in vars(function).items() if name not in ("jvp", "_backward_cls")}
    return type(f"{function.__name__}WithoutJVP", (Function,), members)
