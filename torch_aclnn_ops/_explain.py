"""Show which implementation a call uses, and why."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_aclnn_ops import _call_log
from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._nested import leaves, map_nested
from torch_aclnn_ops._torch_compat.modes import FakeTensorMode

import torch
from torch import Tensor
from torch.optim import Optimizer


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return which implementation a call uses, and why, without computing it.

    The function, and the backward pass of its results, run on fake tensors with the shapes, dtypes and devices of the
    arguments. For calls that do run on an NPU, the logger ``torch_aclnn_ops`` logs the same lines at level DEBUG.

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
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _call_log.explaining() as paths:

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return mode.from_tensor(value.detach()).requires_grad_(value.requires_grad)

        with _state_restored(getattr(function, "__self__", None)):
            results = leaves(function(*map_nested(fake, args), **map_nested(fake, kwargs)))
        losses = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        if losses:
            # Not backward(), which would leave fake gradients in the parameters of a module.
            torch.autograd.grad(losses, _leaves(losses), [torch.ones_like(loss) for loss in losses], allow_unused=True)
    if not paths:
        return "no operator of torch_aclnn_ops: torch's own functions compute this call"
    return "\n".join(f"{operator}: {path}" for operator, path in paths)


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


@contextmanager
def _state_restored(owner: object) -> Iterator[None]:
    """Give an optimizer its state back: a step in it would keep fake tensors."""
    state: dict[Tensor, Any] = owner.state if isinstance(owner, Optimizer) else {}
    before = {parameter: dict(values) for parameter, values in state.items()}
    try:
        yield
    finally:
        state.clear()
        state.update(before)
