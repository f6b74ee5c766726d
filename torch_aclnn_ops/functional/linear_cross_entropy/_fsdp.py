"""Calls whose head is sharded by FSDP.

FSDP2 all-gathers a module's parameters in its forward pass, and reduces their gradients in its backward pass. A loss
computed outside of the module gets neither, so the call is registered as a forward method of the module.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._torch_compat.fsdp import is_in_fsdp_forward
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput

from torch import Tensor
from torch.nn import Module, Parameter

_Result = TypeVar("_Result")

_METHOD = "_call_in_fsdp_forward"
_FSDP1 = (
    "FullyShardedDataParallel (FSDP1) unshards weights in its forward pass only: call linear_cross_entropy in the"
    " forward of the wrapped module, or use fully_shard (FSDP2) and pass fsdp_module"
)


def call_in_fsdp_forward(function: Callable[..., _Result], arguments: dict[str, Any]) -> _Result:
    """Call a function with the unsharded parameters ``linear_weight`` and ``linear_bias`` of ``fsdp_module``.

    Only ``input`` passes through the hooks of FSDP2, which cast it according to the module's policy.
    """
    module = arguments.pop("fsdp_module")
    if not isinstance(module, Module):
        raise TypeError(
            f"linear_cross_entropy: fsdp_module must be None or a torch.nn.Module, but it is {describe(module)}"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {key: names[id(arguments[key])] for key in ("linear_weight", "linear_bias") if id(arguments[key]) in names}
    if "linear_weight" not in found:
        raise ValueError(
            "linear_cross_entropy: linear_weight must currently be a parameter of fsdp_module, but it is none of the"
            f" {len(names)} parameters of this {type(module).__name__}; read it from the module in every call"
        )

    def call(input: Tensor) -> _Result:
        unsharded = {key: module.get_parameter(name) for key, name in found.items()}
        return function(**{**arguments, "input": input, **unsharded})

    sharded = _sharded_module(module, found["linear_weight"])
    if sharded is None or is_in_fsdp_forward(sharded):
        return call(arguments["input"])
    if not hasattr(sharded, _METHOD):
        setattr(sharded, _METHOD, _call)
        _fsdp().register_fsdp_forward_method(sharded, _METHOD)
    result: _Result = getattr(sharded, _METHOD)(call, arguments["input"])
    return result


def check_not_fsdp1_shard(linear_weight: object) -> None:
    """Raise for the flat shard that FSDP1 exposes as a parameter outside of its forward pass."""
    if _fsdp() is not None and isinstance(linear_weight, Parameter) and linear_weight.dim() == 1:
        raise RuntimeError(
            "linear_cross_entropy: linear_weight must have shape (C, H) or (C, d_1, ..., d_K, H), but its shape is"
            f" {list(linear_weight.shape)}; {_FSDP1}"
        )


def _fsdp() -> Any:
    # Importing the module takes a second; if it is not imported, nothing is sharded.
    return sys.modules.get("torch.distributed.fsdp")


def _call(function: Callable[[Tensor], Any], input: Tensor) -> Any:
    # In-place operations on a view would lose the hooks that FSDP2 registers on outputs.
    result = function(input)
    if isinstance(result, Tensor):
        return result.clone()
    return LinearCrossEntropyOutput._make(None if each is None else each.clone() for each in result)


def _sharded_module(module: Module, parameter: str) -> Module | None:
    """Return the innermost module with ``fully_shard`` applied that contains a parameter, or ``None``."""
    fsdp = _fsdp()
    if fsdp is None:
        return None
    *path, _ = parameter.split(".")
    modules = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
    if any(isinstance(one, fsdp.FullyShardedDataParallel) for one in modules):
        raise TypeError(f"linear_cross_entropy: fsdp_module must be a module that fully_shard has sharded; {_FSDP1}")
    sharded = [one for one in modules if isinstance(one, fsdp.FSDPModule)]
    return sharded[-1] if sharded else None
