"""The functions that the drop-ins are compared with: torch's own, or references where torch has none.

``linear_cross_entropy`` is in torch from 2.13. Its reference is the composition in torch's documentation. Older
versions of ``mse_loss`` fail in the backward pass if the dtypes differ; the reference behaves like newer ones.
"""

import functools
import inspect
import math
from types import SimpleNamespace

import torch

HAS_LINEAR_CROSS_ENTROPY = hasattr(torch.nn.functional, "linear_cross_entropy")

# The text of a reference's errors, of which only the type is compared.
REFUSED = "torch 2.13 refuses this with a RuntimeError"


def _linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=None,
    label_smoothing=0.0,
    options=None,
):
    classes, *positions, features = linear_weight.shape
    shape = (*input.shape[:-1], classes, *positions)
    is_accepted = (
        input.dim() in (1, 2)
        and linear_weight.dim() >= 2
        and features == input.shape[-1]
        and (not positions or input.dim() == 2)
        and (linear_bias is None or linear_bias.shape == linear_weight.shape[:-1])
        and (target.shape != shape or ignore_index is None)
    )
    if not is_accepted:
        raise RuntimeError(REFUSED)
    bias = None if linear_bias is None else linear_bias.reshape(classes * math.prod(positions))
    head = linear_weight.reshape(classes * math.prod(positions), features)
    logits = torch.nn.functional.linear(input, head, bias).reshape(shape)
    return torch.nn.functional.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


@functools.wraps(torch.nn.functional.mse_loss)
def _mse_loss(input, target, *args, **options):
    floats = input.is_floating_point() and target.is_floating_point()
    if floats and input.dtype != target.dtype and not _torch_differentiates_mixed_dtypes():
        dtype = torch.promote_types(input.dtype, target.dtype)
        input, target = input.to(dtype), target.to(dtype)
    return torch.nn.functional.mse_loss(input, target, *args, **options)


@functools.cache
def _torch_differentiates_mixed_dtypes():
    input, target = torch.ones((), dtype=torch.float64, requires_grad=True), torch.ones(())
    try:
        torch.nn.functional.mse_loss(input, target).backward()
    except RuntimeError:
        return False
    return True


def signature(function):
    """Return the signature of a function; a builtin's is the first line of its docstring."""
    try:
        return inspect.signature(function)
    except ValueError:
        arguments = function.__doc__.strip().splitlines()[0].partition("(")[2].rpartition(")")[0]
        return inspect.signature(eval(f"lambda {arguments}: None"))


functional = SimpleNamespace(**vars(torch.nn.functional))
if not HAS_LINEAR_CROSS_ENTROPY:
    functional.linear_cross_entropy = _linear_cross_entropy
functional.mse_loss = _mse_loss
