"""Private names of torch for derivatives: autograd dispatch, ``torch.func`` transforms and forward-mode AD."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
after_autograd_keyset = torch._C._after_autograd_keyset
get_interpreter_stack = _functorch.get_interpreter_stack
is_functorch_wrapped_tensor = _functorch.is_functorch_wrapped_tensor
is_batchedtensor = _functorch.is_batchedtensor
get_unwrapped = _functorch.get_unwrapped
is_legacy_batchedtensor = _functorch.is_legacy_batchedtensor
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled


def in_forward_ad() -> bool:
    """Return whether forward-mode AD is active."""
    return forward_ad._current_level >= 0 and _is_fwd_grad_enabled()


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a faster ``Function.apply`` for use outside of transforms, for a Function whose ``forward`` takes ctx."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
