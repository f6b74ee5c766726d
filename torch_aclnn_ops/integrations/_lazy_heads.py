"""Linear layers that return lazy logits in training, and in evaluation if only the loss is requested."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch_aclnn_ops._autograd.derivatives import in_functorch_transform
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._tensors import is_autocast_on, is_plain
from torch_aclnn_ops._torch_compat.private import has_backward_hooks, in_ddp_with_static_graph, version_of
from torch_aclnn_ops.integrations._head_layers import Layer, is_parametrized, versions
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits
from torch_aclnn_ops.integrations._logit_sums import LogitSum
from torch_aclnn_ops.integrations._materializations import Materializations

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

# Versions of the weights of patched heads in their last forward pass.
_versions: WeakKeyDictionary[nn.Linear, int] = WeakKeyDictionary()


def patch(linear: nn.Linear, options: dict[str, Any], record: Materializations) -> None:
    """Replace a layer's forward, so that it returns lazy logits in training, or where the record asks for them."""
    # A partial is copied and pickled with its module.
    setattr(linear, "forward", partial(_forward, linear, options=options, record=record))  # noqa: B010  (mypy rejects the assignment)


def is_patched(linear: nn.Linear, record: Materializations | None = None) -> bool:
    """Return whether a layer, or the layer it was copied from, was patched; with a record, only by the patch of it."""
    replaced = vars(linear).get("forward")
    if not isinstance(replaced, partial) or replaced.func is not _forward:
        return False
    return record is None or replaced.keywords["record"] is record


def _forward(
    linear: nn.Linear,
    input: Tensor,
    *,
    options: dict[str, Any],
    record: Materializations,
    function: Callable[[nn.Linear, Tensor], Tensor] | None = None,
) -> Any:
    """Replacement for a linear layer's forward, which calls ``function`` instead if it is given."""
    if function is not None:
        return function(linear, input)
    is_recorded = torch.is_grad_enabled()
    is_lazy = (linear.training and is_recorded) or record.is_without_logits
    if is_disabled() or not (is_plain(input) and is_lazy):
        return nn.Linear.forward(linear, input)
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    if not is_plain(weight):
        return nn.functional.linear(input, weight, bias)
    if not is_recorded:
        # What is computed later has no graph either.
        input, weight, bias = input.detach(), weight.detach(), None if bias is None else bias.detach()
    autocast = torch.get_autocast_dtype(input.device.type) if is_autocast_on(input) else None
    is_compiling = torch.compiler.is_compiling()
    # Logits without a graph do not outlive the forward pass, and inference tensors have no version.
    is_checked = is_recorded and not is_compiling
    read = versions(input, weight, bias) if is_checked else None
    in_static_graph = not is_compiling and in_ddp_with_static_graph()
    layer = Layer(input, linear, weight, bias, read, autocast, in_static_graph)
    dtype = weight.dtype if autocast is None or weight.dtype == torch.float64 else autocast
    if not is_compiling:
        if not record.is_seen:
            record.begin()  # because no hook has
        record.heads += 1
        # No optimizer has a weight that is computed.
        if is_checked and not (is_parametrized(linear) or in_functorch_transform()):
            # For optimizers that change the weight without a new version.
            _register_hook()
            _versions[linear] = version_of(linear.weight)
    logits = LazyLogits(LogitSum((layer,), (), None, dtype, options), Layer.output, (layer,), {}, record)
    return logits.materialize("a backward hook of the head") if is_recorded and has_backward_hooks(linear) else logits


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    """Increment the version of head weights that an optimizer changed without doing so, as through ``weight.data``.

    Logits materialized afterwards would be those of the new weights; with a new version, they raise an error.
    """
    if torch.compiler.is_compiling():
        return
    for linear, version in list(_versions.items()):
        if is_parametrized(linear):  # since the call
            continue
        weight = linear.weight
        if not is_plain(weight) or weight.grad is None or version_of(weight) != version:
            continue
        if any(param is weight for group in optimizer.param_groups for param in group["params"]):
            torch.autograd.graph.increment_version(weight)
