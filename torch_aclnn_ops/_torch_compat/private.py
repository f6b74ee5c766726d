"""Private names of torch, grouped by the feature that needs them."""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Modes: dispatch, autocast, fake tensors, DistributedDataParallel and compilation.
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


# Operators and derivatives: schemas, autograd dispatch, torch.func transforms and forward-mode AD.
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
after_autograd_keyset = torch._C._after_autograd_keyset
get_interpreter_stack = _functorch.get_interpreter_stack
is_functorch_wrapped_tensor = _functorch.is_functorch_wrapped_tensor
is_batchedtensor = _functorch.is_batchedtensor
get_unwrapped = _functorch.get_unwrapped
is_legacy_batchedtensor = _functorch.is_legacy_batchedtensor
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled


def in_forward_ad() -> bool:
    """Return whether forward-mode AD is active."""
    return forward_ad._current_level >= 0 and (torch.compiler.is_compiling() or _is_fwd_grad_enabled())


def arguments_of(operator: Any) -> list[torch.Argument]:
    """Return the arguments of an operator's schema."""
    arguments: list[torch.Argument] = operator._schema.arguments
    return arguments


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a faster ``Function.apply`` for use outside of transforms, for a Function whose ``forward`` takes ctx."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# Optimizers: foreach kernels, version counters, hooks and gradient scalers.
foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_exp: Callable[..., Any] = torch._foreach_exp
foreach_lerp_: Callable[..., Any] = torch._foreach_lerp_
foreach_neg: Callable[..., Any] = torch._foreach_neg
fused_adam_: Callable[..., Any] = torch._fused_adam_
fused_adamw_: Callable[..., Any] = torch._fused_adamw_

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the version counter of a tensor."""


def load_state_dict_hooks(optimizer: Any) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return an optimizer's ``load_state_dict`` pre-hooks and post-hooks."""
    before = optimizer._optimizer_load_state_dict_pre_hooks
    after = optimizer._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())


def per_optimizer_state(grad_scaler: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state that a ``GradScaler`` keeps for an optimizer."""
    state: dict[str, Any] = grad_scaler._per_optimizer_states[id(optimizer)]
    return state


# Modules: hooks that get the gradient of their output.
def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module, or every module, has hooks that its backward pass calls."""
    of_all = torch.nn.modules.module
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or of_all._global_backward_hooks or of_all._global_backward_pre_hooks)


# Distributed: traceable collectives, which torch has only if it is built with them; groups by name; DTensor specs.
c10d_functional = torch.ops._c10d_functional


@assume_constant_result
def device_types_of_group(group_name: str) -> tuple[str, ...]:
    """Return the device types that a process group supports."""
    group: Any = torch._C._distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return tuple(device.type for device in group._device_types)


def dtensor_of_local(tensor: torch.Tensor) -> Any:
    """Return the spec of the DTensor whose ``to_local()`` created a tensor, according to autograd, or ``None``."""
    return getattr(tensor.grad_fn, "dtensor_spec", None)


# FSDP: the modules that own sharded parameters.
class Fsdp2Unit:
    """The parameters that one call of ``fully_shard`` all-gathers and shards together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.params: list[Tensor] = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
        self.device: torch.device = group.device

    def is_busy(self) -> bool:
        """Return whether a forward or backward pass is in progress."""
        return bool(self._group._training_state.name != "IDLE")

    def reshard(self) -> None:
        """Reshard the parameters, also after a failed pass or during a prefetched all-gather."""
        self._group.wait_for_unshard()
        self._group._to_sharded()


def fsdp2_units() -> Iterator[Fsdp2Unit]:
    """Yield the units of all modules in this process that ``fully_shard`` was applied to."""
    from torch.distributed._composable_state import _module_state_mapping

    modules: list[Any] = [module for module in list(_module_state_mapping) if hasattr(module, "_get_fsdp_state")]
    for state in {module._get_fsdp_state() for module in modules}:
        # 2.13 has a list of them; 2.9 has one, or None where a module has no parameters of its own.
        groups = getattr(state, "_fsdp_param_groups", None)
        yield from map(Fsdp2Unit, filter(None, [state._fsdp_param_group] if groups is None else groups))


class Fsdp1Unit:
    """The parameters that one ``FullyShardedDataParallel`` module all-gathers and shards together."""

    def __init__(self, module: Any) -> None:
        self._module, self._handle = module, module._handle
        flat_param = self._handle.flat_param
        self.params: list[Tensor] = [flat_param, *(flat_param._params or [])]
        self.device: torch.device = self._handle.device

    def is_busy(self) -> bool:
        """Return whether a forward or backward pass, or ``summon_full_params``, is in progress."""
        return bool(self._handle._training_state.name != "IDLE")

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        from torch.distributed.fsdp._runtime_utils import _reshard

        if self._module._is_root is not None:  # there was a forward pass
            _reshard(self._module, self._handle, self._handle.uses_sharded_strategy)


def is_in_fsdp1_unit(param: Tensor) -> bool:
    """Return whether a parameter was flattened or created by ``FullyShardedDataParallel``."""
    return getattr(param, "_fsdp_flattened", False)


def _fsdp1_class() -> type | tuple[()]:
    """Return ``FullyShardedDataParallel`` if it has been imported, else an empty tuple."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else fsdp.FullyShardedDataParallel


def fsdp1_units(model: torch.nn.Module) -> list[Fsdp1Unit]:
    """Return the units of a model."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, _fsdp1_class())]
    return [Fsdp1Unit(module) for module in modules if module._handle is not None]


def fsdp1_module(model: torch.nn.Module) -> Any:
    """Return the first ``FullyShardedDataParallel`` in a model, or ``None``."""
    fsdp1 = _fsdp1_class()
    return next((module for module in model.modules() if isinstance(module, fsdp1)), None)


def fsdp1_groups(module: Any) -> list[Any]:
    """Return the process groups over which an FSDP1 module is distributed, one per dimension."""
    between = getattr(module, "_inter_node_pg", None)  # with HYBRID_SHARD
    return [module.process_group] + ([] if between is None else [between])


def fsdp1_tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Return, for each parameter in FSDP1 modules, all names under which it is in the model's state dict."""
    prefixes = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        prefixes[module].append(f"{name}.".replace("_fsdp_wrapped_module.", "").removeprefix("."))
    names: dict[tuple[torch.nn.Module, str], list[str]] = defaultdict(list)
    wrappers: list[Any] = [module for module in prefixes if isinstance(module, _fsdp1_class())]
    for flat_param in (wrapper._handle.flat_param for wrapper in wrappers if wrapper._handle is not None):
        for param_name, owner, _ in flat_param._param_infos:
            names[owner, param_name] += [prefix + param_name for prefix in prefixes[owner]]
        for tied in flat_param._shared_param_infos:
            others = [prefix + tied.param_name for prefix in prefixes[tied.module]]
            names[tied.prim_module, tied.prim_param_name] += others
    return list(names.values())


def is_in_fsdp_forward(fsdp_module: Any) -> bool:
    """Return whether an FSDP2 module is in its forward pass."""
    return bool(fsdp_module._get_fsdp_state()._training_state.name == "FORWARD")


def modules_sharded_with(module: Any) -> int:
    """Return the number of modules that ``fully_shard`` sharded together with this one; 0 if it is not sharded."""
    if not hasattr(module, "_get_fsdp_state"):
        return 0
    return len(module._get_fsdp_state()._modules)
