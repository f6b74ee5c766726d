"""Apply one ``autograd.Function`` in eager mode, with every derivative, and under ``torch.compile``."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops.ops._derivatives import in_functorch_transform, in_nested_forward_mode

import torch
from torch.autograd import Function


class EagerOrCompiled:
    """Choose the form of a Function that the caller's mode can differentiate.

    Dynamo refuses a Function that defines ``jvp``; eager forward-mode AD needs it. So a compiled call goes to a twin of
    the Function without ``jvp``. Inside a transform of ``torch.func`` that is itself compiled, dynamo would take all
    but the first derivative of a Function for zero, and so does PyTorch in a jvp of a jvp; there the call goes to
    differentiable torch calls.

    Args:
        function: a Function with ``forward`` (without ctx), ``setup_context``, ``backward`` and ``jvp``.
        formula: the same function of the same arguments in torch calls.
    """

    def __init__(self, function: type[Function], formula: Callable[..., Any]) -> None:
        self.eager = function
        self.compiled = _without_jvp(function)
        self.formula = formula

    def __call__(self, *args: Any) -> Any:
        """Apply the Function."""
        if not torch.compiler.is_compiling():
            return self.formula(*args) if in_nested_forward_mode() else self.eager.apply(*args)
        return self.formula(*args) if in_functorch_transform() else self.compiled.apply(*args)


def _without_jvp(function: type[Function]) -> type[Function]:
    members = {name: member for name, member in vars(function).items() if name not in ("jvp", "_backward_cls")}
    return type(f"{function.__name__}WithoutJVP", (Function,), members)
