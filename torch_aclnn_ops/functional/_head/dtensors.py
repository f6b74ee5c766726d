"""DTensors and their local tensors among the arguments of a call."""

import sys
from typing import Any

from torch_aclnn_ops._torch_compat.distributed import dtensor_of_local

from torch import Tensor


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing them."""
    # Importing the module takes a second; if it is not imported, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_not_local_shard(function: str, name: str, weight: Tensor, condition: str, remedy: str) -> None:
    """Raise if autograd shows that a head is the local shard of a DTensor, but no option says so.

    Args:
        function: The name of the function.
        name: The name of the head.
        weight: The head, which has a ``grad_fn``.
        condition: When the head must have all classes.
        remedy: What to do if the head is sharded by FSDP2.
    """
    spec = dtensor_of_local(weight)
    if spec is not None and spec.mesh.size() > 1 and not all(one.is_replicate() for one in spec.placements):
        raise ValueError(
            f"{function}: {name} must have all classes if {condition}, but it is the to_local() of a DTensor with"
            f" placements {spec.placements}; {remedy}; if the ranks share the vocabulary, and all have the same input,"
            " pass process_group"
        )
