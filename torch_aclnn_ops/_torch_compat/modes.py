"""Private names of torch about its modes: of dispatch, of autocast, of fake tensors, and of compilation."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from torch_aclnn_ops._torch_compat import lookup

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Without them it is asked more often, or of every call, which costs more.
is_any_autocast_enabled = lookup("_C._is_any_autocast_enabled", "a short call outside of autocast", lambda: True)
_number_of_dispatch_modes = lookup("_C._len_torch_dispatch_stack", "a short call outside of modes", lambda: 1)
disable_current_modes = lookup(
    "utils._python_dispatch._disable_current_modes", "explain() before the first call", nullcontext
)
FakeTensorMode = lookup("_subclasses.fake_tensor.FakeTensorMode", "explain()")


def in_dispatch_mode() -> bool:
    """Return whether a ``TorchDispatchMode`` sees the calls of operators."""
    return bool(_number_of_dispatch_modes() > 0)


def assume_constant_result(function: _Function) -> _Function:
    """Let Dynamo call a function while it traces, and take the result for a constant.

    ``torch.compiler.assume_constant_result`` does no more than this, after an import of a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def load_tables_of_functions() -> None:
    """Let torch make its tables of functions, which it does once, before somebody replaces one of them.

    Dynamo would take a replacement for torch's own, and not trace it.
    """
    lookup("_dynamo.trace_rules.get_torch_obj_rule_map", "compiled code under patch()", lambda: None)()
    torch.overrides.get_testing_overrides()


@assume_constant_result  # Dynamo of 2.9 cannot trace it
def is_autocast_available(device_type: str) -> bool:
    """Return whether tensors of a type of device can be autocast."""
    return torch.amp.is_autocast_available(device_type)


# Wrapper subclasses of tensors read their own attributes with it.
without_torch_function = lookup("_C.DisableTorchFunctionSubclass", "patch_model()")
