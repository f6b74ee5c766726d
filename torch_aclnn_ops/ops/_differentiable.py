"""Apply one ``autograd.Function`` in eager mode, inside transforms and under ``torch.compile``."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops import _cpu_extension, _extension
from torch_aclnn_ops._torch_compat import apply_of
from torch_aclnn_ops.ops._derivatives import any_wrapped, in_functorch_transform, in_nested_forward_mode

import torch
from torch.autograd import Function


class EagerOrCompiled:
    """Choose the form of a Function that the caller's mode can differentiate.

    ===================================  ===============================================================
    eager, on an NPU or a CPU            ``native``, where it serves
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
        native: the name of an autograd function of the extensions, in C++.
        serves: whether ``native`` serves these arguments.
    """

    def __init__(
        self,
        function: type[Function],
        formula: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
        native: str = "",
        serves: Callable[..., bool] | None = None,
    ) -> None:
        self._in_transforms: Callable[..., Any] = function.apply
        self._light: Callable[..., Any] = apply_of(_with_ctx(function))
        self._compiled: Callable[..., Any] = compiled or _without_jvp(function).apply
        self._formula = formula
        self._has_operator = compiled is not None
        self._native_name, self._serves = native, serves
        self._natives: dict[bool, Callable[..., Any]] = {}  # by whether they are for CPUs

    def __call__(self, *args: Any) -> Any:
        """Apply the Function."""
        is_transformed = in_functorch_transform()
        if torch.compiler.is_compiling():
            return self._formula(*args) if is_transformed and not self._has_operator else self._compiled(*args)
        if not is_transformed and not any_wrapped(args):
            if self._serves is None or not self._serves(*args):
                return self._light(*args)
            is_cpu = args[0].is_cpu
            native = self._natives.get(is_cpu) or self._make_native(is_cpu)
            return native(*args)
        return self._formula(*args) if in_nested_forward_mode() else self._in_transforms(*args)

    def _make_native(self, is_cpu: bool) -> Callable[..., Any]:
        name, light = self._native_name, self._light
        native = _cpu_extension.function(name, light) if is_cpu else _extension.functions[name](light)
        self._natives[is_cpu] = native
        return native


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
