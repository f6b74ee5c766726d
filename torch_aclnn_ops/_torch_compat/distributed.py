"""Private names of torch.distributed: traceable collectives, process groups by name, and DTensor specs."""

from typing import Any

from torch_aclnn_ops._torch_compat.modes import assume_constant_result

import torch

# Present only if torch is built with distributed.
c10d_functional = torch.ops._c10d_functional


@assume_constant_result
def device_types_of_group(group_name: str) -> tuple[str, ...]:
    """Return the device types that a process group supports."""
    group: Any = torch._C._distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return tuple(device.type for device in group._device_types)


def dtensor_of_local(tensor: torch.Tensor) -> Any:
    """Return the spec of the DTensor whose ``to_local()`` created a tensor, according to autograd, or ``None``."""
    return getattr(tensor.grad_fn, "dtensor_spec", None)
