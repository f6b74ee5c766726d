"""Private names of torch about derivatives: of operators that are called directly, of transforms, in forward mode."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops._torch_compat import lookup

import torch
from torch.autograd import forward_ad

_OPERATORS = "torch.ops.torch_aclnn_ops"
AutoDispatchBelowAutograd = lookup("_C._AutoDispatchBelowAutograd", _OPERATORS)
after_autograd_keyset = lookup("_C._after_autograd_keyset", _OPERATORS)

# Without them every call is made as inside of a transform, which costs more, but for tensors whose transform is over.
_TRANSFORMS = "telling calls inside of torch.func from others"
get_interpreter_stack = lookup("_C._functorch.get_interpreter_stack", _TRANSFORMS, list)
is_functorch_wrapped_tensor = lookup("_C._functorch.is_functorch_wrapped_tensor", _TRANSFORMS, lambda _: False)
is_legacy_batchedtensor = lookup(
    "_C._functorch.is_legacy_batchedtensor", "torch.autograd.grad(..., is_grads_batched=True)", lambda _: False
)

# Without them every tensor may have a tangent, which costs more.
_FORWARD_MODE = "telling whether forward-mode AD is on"
_is_fwd_grad_enabled = lookup("_C._is_fwd_grad_enabled", _FORWARD_MODE, lambda: True)
lookup("autograd.forward_ad._current_level", _FORWARD_MODE, None)


def in_forward_ad() -> bool:
    """Return whether operators have to push tangents forward."""
    return getattr(forward_ad, "_current_level", 0) >= 0 and _is_fwd_grad_enabled()


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies a Function whose forward has ctx, outside of transforms: half of ``apply`` is about them."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
