"""Private names of torch about processes: collectives that can be traced, groups by their names, DTensors."""

from typing import Any

from torch_aclnn_ops._torch_compat import attribute, lookup
from torch_aclnn_ops._torch_compat.modes import assume_constant_result

import torch

# The operators of a torch that is built with distributed.
c10d_functional = torch.ops._c10d_functional


@assume_constant_result
def device_types_of_group(group_name: str) -> tuple[str, ...]:
    """Return the types of device whose tensors a process group takes."""
    group = lookup("_C._distributed_c10d._resolve_process_group", "process_group=")(group_name)
    return tuple(device.type for device in attribute(group, "_device_types", "process_group="))


def dtensor_of_local(tensor: torch.Tensor) -> Any:
    """Return mesh and placements of the DTensor that a tensor is the ``to_local()`` of, or ``None``; autograd knows."""
    return getattr(tensor.grad_fn, "dtensor_spec", None)
