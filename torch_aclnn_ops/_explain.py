"""Show which implementation a call uses, and why."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops import _call_log
from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._nested import leaves, map_nested

import torch
from torch import Tensor


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Run a call and the backward pass of its results, and return which implementations computed them, and why.

    The call is made as any other: the step of an optimizer updates its parameters, and a :func:`report` counts it. No
    ``.grad`` changes. The logger ``torch_aclnn_ops`` logs the same lines at level DEBUG. Calls that other threads make
    meanwhile are included.

    Args:
        function: A function or module that calls this package.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        One line per operator of this package that the call reaches.

    Raises:
        TypeError: ``function`` cannot be called.

    Example:
        >>> from torch_aclnn_ops import functional as F
        >>> print(explain(F.mse_loss, torch.ones(2, requires_grad=True), torch.ones(2)))
        mse_loss_backward: native PyTorch kernel, because the tensors are on cpu
    """
    if not callable(function):
        raise TypeError(f"explain: function must be a function or module, but it is {describe(function)}")

    def as_leaf(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    with _call_log.collecting() as lines:
        results = leaves(function(*map_nested(as_leaf, args), **map_nested(as_leaf, kwargs)))
        losses = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        if losses:
            # Not backward(), which would add to .grad; what the function refers to may be differentiated again.
            ones = [torch.ones_like(loss) for loss in losses]
            torch.autograd.grad(losses, _leaves(losses), ones, retain_graph=True, allow_unused=True)
    if not lines:
        return "no operator of torch_aclnn_ops: torch's own functions compute this call"
    return "\n".join(dict.fromkeys(lines))


def _leaves(losses: list[Tensor]) -> list[Tensor]:
    """Return the tensors to which a backward from the losses would add gradients."""
    leaves = [loss for loss in losses if loss.grad_fn is None]
    nodes = [loss.grad_fn for loss in losses]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes.extend(following for following, _ in node.next_functions)
    return leaves
