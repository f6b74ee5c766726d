"""Private names of torch for modes: dispatch, autocast, fake tensors and compilation."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

_Function = TypeVar("_Function", bound=Callable[..., Any])

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
number_of_dispatch_modes = torch._C._len_torch_dispatch_stack
disable_current_modes = _python_dispatch._disable_current_modes
# The same as torch.compiler.disable, without its import, which takes a second.
disable_compilation = torch._compile._disable_dynamo
_active_ddp_module: Callable[[], Any] = DistributedDataParallel._get_active_ddp_module


def in_ddp_with_static_graph() -> bool:
    """Return whether this is the forward pass of ``DistributedDataParallel(static_graph=True)``."""
    module = _active_ddp_module()
    return module is not None and bool(module.static_graph)


def ddp_searches_outputs() -> bool:
    """Return whether this is a forward pass of ``DistributedDataParallel`` that searches the outputs for tensors."""
    module = _active_ddp_module()
    return module is not None and bool(module.static_graph or module.find_unused_parameters)


def in_dispatch_mode() -> bool:
    """Return whether a ``TorchDispatchMode`` is active."""
    return bool(number_of_dispatch_modes() > 0)


def assume_constant_result(function: _Function) -> _Function:
    """Let Dynamo call a function while tracing and treat the result as a constant.

    The same as ``torch.compiler.assume_constant_result``, without its import, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def load_tables_of_functions() -> None:
    """Populate torch's cached tables of functions before a function is patched.

    Otherwise Dynamo would treat the replacement as torch's own function and not trace it.
    """
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()
    torch.overrides.get_testing_overrides()


@assume_constant_result  # Dynamo of 2.9 cannot trace it
def is_autocast_available(device_type: str) -> bool:
    """Return whether a device type supports autocast."""
    return torch.amp.is_autocast_available(device_type)
