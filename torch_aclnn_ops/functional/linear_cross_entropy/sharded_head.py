"""Heads that are sharded: DTensors, whose placements say how the vocabulary is cut, and parameters of FSDP2's modules.

FSDP2 all-gathers a module's parameters in its forward pass, and reduces their gradients in its backward pass. A loss
computed outside of the module gets neither, so the call is registered as a forward method of the module.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._tensors import is_dtensor
from torch_aclnn_ops._torch_compat.private import is_in_fsdp_forward
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_Result = TypeVar("_Result")

_METHOD = "_call_in_fsdp_forward"
FSDP1 = (
    "FullyShardedDataParallel (FSDP1) unshards weights in its forward pass only: call linear_cross_entropy in the"
    " forward of the wrapped module, or use fully_shard (FSDP2) and pass fsdp_module"
)
FSDP_HINT = "if it is sharded by fully_shard (FSDP2), pass the model that owns it as fsdp_module"
_TENSORS = ("input", "linear_weight", "target", "linear_bias", "weight", "token_weight")


def local_arguments(
    call: Call, process_group: Any, vocab_sizes: Sequence[int] | None, reduce_input_grad: bool
) -> tuple[Call, Any, Sequence[int] | None]:
    """Convert DTensor arguments to local tensors, and return them with the process group and the shard sizes.

    A head with placement ``Shard(0)`` on a one-dimensional mesh, and its bias, are vocab-parallel over the mesh's group
    if ``process_group`` is given or the input is a DTensor on the same mesh. Otherwise it raises, because the shards of
    FSDP2 look the same, but every rank has different rows. The gradients of DTensors are DTensors with the same
    placements. Plain tensors are assumed to be replicated. Calls without DTensors are returned unchanged.

    ``reduce_input_grad``: whether the gradient of the input is reduced on every rank, instead of ``Partial()``.
    """
    tensors: dict[str, Any] = {name: getattr(call, name) for name in _TENSORS}
    dtensors: dict[str, DTensor] = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    if not dtensors:
        return call, process_group, vocab_sizes
    from torch.distributed.tensor import Partial, Replicate, Shard

    head = dtensors.get("linear_weight")
    if head is None:
        name, tensor = next(iter(dtensors.items()))
        raise ValueError(
            f"linear_cross_entropy: {name} must be a plain tensor if linear_weight is one, but it is a DTensor with"
            f" placements {tensor.placements}; pass its to_local() or full_tensor(), or shard linear_weight by Shard(0)"
        )
    mesh = head.device_mesh
    if mesh.ndim != 1 or head.placements != (Shard(0),):
        raise ValueError(
            "linear_cross_entropy: linear_weight must be a plain tensor, or a DTensor with placements (Shard(dim=0),)"
            f" on a mesh of one dimension, but it has placements {head.placements} on a mesh of shape"
            f" {tuple(mesh.shape)}; {FSDP_HINT}, else redistribute it"
        )
    if process_group is None and "input" not in dtensors:
        raise ValueError(
            "linear_cross_entropy: linear_weight must be a plain tensor if input is one and neither process_group"
            f" nor fsdp_module is given, but it is a DTensor with placements {head.placements}, which is ambiguous:"
            f" {FSDP_HINT}; if the ranks share the vocabulary, and all have the same input, pass the group of its mesh"
            " as process_group, or an input that is a DTensor with Replicate() on this mesh"
        )
    for name, tensor in tensors.items():
        is_of_head = name in ("linear_weight", "linear_bias")
        if name in dtensors or (is_of_head and isinstance(tensor, Tensor)):
            accepted = (Shard(0),) if is_of_head else (Replicate(),)
            mesh_and_placements = (tensor.device_mesh, tensor.placements) if name in dtensors else "none"
            if mesh_and_placements != (mesh, accepted):
                raise ValueError(
                    f"linear_cross_entropy: {name} must be a DTensor with placements {accepted} on linear_weight's"
                    f" mesh, {mesh}, but its mesh and placements are {mesh_and_placements}; redistribute it"
                )
    if vocab_sizes is None:
        size = -(-head.shape[0] // mesh.size())
        vocab_sizes = [max(min(size, head.shape[0] - rank * size), 0) for rank in range(mesh.size())]
    input_grad_placements = None if reduce_input_grad else [Partial()]
    local: dict[str, Any] = {
        name: tensor.to_local(grad_placements=input_grad_placements if name == "input" else None)
        for name, tensor in dtensors.items()
    }
    return call._replace(**local), mesh.get_group() if process_group is None else process_group, vocab_sizes


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
        raise TypeError(f"linear_cross_entropy: fsdp_module must be a module that fully_shard has sharded; {FSDP1}")
    sharded = [one for one in modules if isinstance(one, fsdp.FSDPModule)]
    return sharded[-1] if sharded else None
