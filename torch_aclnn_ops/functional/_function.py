"""Apply one ``autograd.Function`` in eager mode, with every derivative, and under ``torch.compile``."""

from typing import Any

import torch
from torch.autograd import Function


class EagerOrCompiled:
    """Choose the form of a Function that the caller's mode can differentiate.

    Dynamo refuses a Function that defines ``jvp``; eager forward-mode AD needs it. So a compiled call goes to a twin of
    the Function without ``jvp``.

    Args:
        function: a Function with ``forward`` (without ctx), ``setup_context``, ``backward`` and ``jvp``.
    """

    def __init__(self, function: type[Function]) -> None:
        self.eager = function
        self.compiled = _without_jvp(function)

    def __call__(self, *args: Any) -> Any:
        """Apply the Function."""
        if torch.compiler.is_compiling():
            return self.compiled.apply(*args)
        return self.eager.apply(*args)


def _without_jvp(function: type[Function]) -> type[Function]:
    members = {name: member for name, member in vars(function).items() if name not in ("jvp", "_backward_cls")}
    return type(f"{function.__name__}WithoutJVP", (Function,), members)
