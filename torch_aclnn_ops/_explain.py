"""Say which path a call takes, and why."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops.ops import _paths

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["explain"]


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Say which path a call takes, and why, without computing it.

    The function runs on fake tensors of the arguments' shapes, dtypes and devices, and so does the backward of what it
    returns. Where calls run as usual, the log ``torch_aclnn_ops`` says the same at level DEBUG for those on an NPU.

    Args:
        function: a function or module that calls this package.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        A line for each operator of this package that the call reaches.

    Example:
        >>> from torch_aclnn_ops import functional as F
        >>> print(explain(F.mse_loss, torch.ones(2, requires_grad=True), torch.ones(2)))
        mse_loss_backward: native kernel of torch, because the tensors are on cpu
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _paths.recording() as paths:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        results = tree_leaves(function(*tree_map(fake, args), **tree_map(fake, kwargs)))
        losses = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        if losses:
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    if not paths:
        return "no operator of torch_aclnn_ops: torch's own functions serve this call"
    return "\n".join(f"{operator}: {path}" for operator, path in paths)
