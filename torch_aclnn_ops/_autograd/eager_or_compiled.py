"""Apply one ``autograd.Function`` in eager mode, inside transforms and under ``torch.compile``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_aclnn_ops import _cpu_extension, _extension
from torch_aclnn_ops._autograd.derivatives import any_wrapped, in_functorch_transform, in_nested_forward_mode
from torch_aclnn_ops._call_log import is_logging
from torch_aclnn_ops._numerics import DTYPES
from torch_aclnn_ops._torch_compat.derivatives import apply_of

import torch
from torch.autograd import Function


@dataclass(frozen=True)
class NativeFunction:
    """An autograd function of the extensions, in C++, for ordinary eager calls.

    Attributes:
        name: of the function.
        why_not_dtype: says why CANN's operator, in which it ends, takes no matrices of a dtype.
        cpu_dtypes: those of the floating-point arguments on a CPU.
    """

    name: str
    why_not_dtype: Callable[[torch.dtype], str | None]
    cpu_dtypes: Sequence[torch.dtype] = DTYPES

    def make_entry(self, device: str, fallback: Callable[..., Any]) -> Callable[..., Any] | None:
        """Make what takes the calls on a kind of device, and leaves to ``fallback`` those that it does not take."""
        if device == "cpu":
            return _cpu_extension.function(self.name, fallback, self.cpu_dtypes)
        if device != "npu" or self.name not in _extension.functions:
            return None
        taken = [dtype for dtype in DTYPES if self.why_not_dtype(dtype) is None]
        return _extension.functions[self.name](fallback, taken)


class EagerOrCompiled:
    """Choose the form of a Function that the caller's mode can differentiate.

    ===================================  ===============================================================
    eager, on an NPU or a CPU            ``native``, which leaves what it does not take to the rows below
    eager                                a twin whose forward has ctx: half the cost of ``setup_context``
    inside ``torch.func``                the Function, which transforms can see through; also with what is left of them
    inside a jvp of a jvp                ``formula``: PyTorch takes the tangent of a Function for a constant
    compiled                             a twin without ``jvp``, which Dynamo refuses; or ``compiled``
    compiled, inside ``torch.func``      ``formula``: Dynamo takes all but a Function's first derivative for 0
    ===================================  ===============================================================

    Args:
        function: a Function with ``forward`` (without ctx), ``setup_context``, ``backward`` and ``jvp``.
        formula: the same function of the same arguments in torch calls.
        compiled: an operator that compiled code calls instead of a Function.
        native: the same function in C++; who wants to hear of paths gets those in Python.
    """

    def __init__(
        self,
        function: type[Function],
        formula: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
        native: NativeFunction | None = None,
    ) -> None:
        self._in_transforms: Callable[..., Any] = function.apply
        self._light: Callable[..., Any] = apply_of(_with_ctx(function))
        self._compiled: Callable[..., Any] = compiled or _without_jvp(function).apply
        self._formula = formula
        self._has_operator = compiled is not None
        self._native = native
        self._entries: dict[str, Callable[..., Any]] = {}  # of the native function, by kinds of devices

    def __call__(self, *args: Any) -> Any:
        """Apply the Function."""
        if torch.compiler.is_compiling():
            is_refused = in_functorch_transform() and not self._has_operator
            return self._formula(*args) if is_refused else self._compiled(*args)
        if self._native is None or is_logging():
            return self._apply(*args)
        device = args[0].device.type
        entry = self._entries.get(device) or self._make_entry(self._native, device)
        return entry(*args)

    def _make_entry(self, native: NativeFunction, device: str) -> Callable[..., Any]:
        entry = native.make_entry(device, self._apply)
        if entry is None:  # not for ever: torch_npu may be imported later
            return self._apply
        self._entries[device] = entry
        return entry

    def _apply(self, *args: Any) -> Any:
        if not in_functorch_transform() and not any_wrapped(args):
            return self._light(*args)
        return self._formula(*args) if in_nested_forward_mode() else self._in_transforms(*args)


def _with_ctx(function: type[Function]) -> type[Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    members: dict[str, Any] = {"forward": forward, "backward": function.backward, "jvp": function.jvp}
    return type(function.__name__, (Function,), {name: staticmethod(member) for name, member in members.items()})


def _without_jvp(function: type[Function]) -> type[Function]:
    members = {name: member for name, member in vars(function).items() if name not in ("jvp", "_backward_cls")}
    return type(f"{function.__name__}WithoutJVP", (Function,), members)
