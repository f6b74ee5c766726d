"""Private names of torch for derivatives: autograd dispatch, ``torch.func`` transforms and forward-mode AD."""

from collections.abc import Callable
from typing import Any

from torch_aclnn_ops._torch_compat import lookup

import torch
from torch.autograd import forward_ad

_OPERATORS = "torch.ops.torch_aclnn_ops"
AutoDispatchBelowAutograd = lookup("_C._AutoDispatchBelowAutograd", _OPERATORS)
after_autograd_keyset = lookup("_C._after_autograd_keyset", _OPERATORS)

# Without them every call takes the slower implementation for transforms; wrapped tensors are not detected.
_TRANSFORMS = "telling calls inside of torch.func from others"
get_interpreter_stack = lookup("_C._functorch.get_interpreter_stack", _TRANSFORMS, list)
is_functorch_wrapped_tensor = lookup("_C._functorch.is_functorch_wrapped_tensor", _TRANSFORMS, lambda _: False)
is_batchedtensor = lookup("_C._functorch.is_batchedtensor", _TRANSFORMS, lambda _: False)
get_unwrapped = lookup("_C._functorch.get_unwrapped", _TRANSFORMS)
is_legacy_batchedtensor = lookup(
    "_C._functorch.is_legacy_batchedtensor", "torch.autograd.grad(..., is_grads_batched=True)", lambda _: False
)

# Without them every tensor is assumed to have a tangent, which is slower.
_FORWARD_MODE = "telling whether forward-mode AD is on"
_is_fwd_grad_enabled = lookup("_C._is_fwd_grad_enabled", _FORWARD_MODE, lambda: True)
lookup("autograd.forward_ad._current_level", _FORWARD_MODE, None)


def in_forward_ad() -> bool:
    """Return whether forward-mode AD is active."""
    return getattr(forward_ad, "_current_level", 0) >= 0 and _is_fwd_grad_enabled()


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a faster ``Function.apply`` for use outside of transforms, for a Function whose ``forward`` takes ctx."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
