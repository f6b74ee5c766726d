"""Private names of FSDP, to find the modules that own sharded parameters."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Fsdp2Unit:
    """The parameters that one call of ``fully_shard`` all-gathers and shards together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.params: list[Tensor] = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
        self.device: torch.device = group.device

    def is_busy(self) -> bool:
        """Return whether a forward or backward pass is in progress."""
        name: str = self._group._training_state.name
        return name != "IDLE"

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
        name: str = self._handle._training_state.name
        return name != "IDLE"

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
    name: str = fsdp_module._get_fsdp_state()._training_state.name
    return name == "FORWARD"


def modules_sharded_with(module: Any) -> int:
    """Return the number of modules that ``fully_shard`` sharded together with this one; 0 if it is not sharded."""
    if not hasattr(module, "_get_fsdp_state"):
        return 0
    return len(module._get_fsdp_state()._modules)
