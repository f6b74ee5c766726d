"""What the drop-ins are compared with: torch's own functions and modules, or references where torch has none.

``linear_cross_entropy`` is in torch since 2.13. Its reference is what torch's documentation says that it stands for.
Older versions of ``mse_loss`` fail in the backward pass where the dtypes differ; the reference does what newer ones do.
"""

import functools
import inspect
import math
from types import SimpleNamespace

import torch

HAS_LINEAR_CROSS_ENTROPY = hasattr(torch.nn.functional, "linear_cross_entropy")

# The text of a reference's errors, which promise their type only.
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


class LinearCrossEntropyLoss(torch.nn.Module):
    """The reference of the module, whose state dict and description are torch 2.13's."""

    def __init__(
        self,
        in_features,
        num_classes,
        *,
        out_features=(),
        bias=False,
        device=None,
        dtype=None,
        reduction="mean",
        weight=None,
        ignore_index=None,
        label_smoothing=0.0,
        options=None,
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        outputs = num_classes * math.prod(out_features)
        self.linear = torch.nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)
        self.shape = (num_classes, *out_features)
        self.options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}

    def forward(self, input, target):
        bias = None if self.linear.bias is None else self.linear.bias.reshape(self.shape)
        head = self.linear.weight.reshape(*self.shape, -1)
        return _linear_cross_entropy(input, head, target, linear_bias=bias, weight=self.weight, **self.options)

    def extra_repr(self):
        facts = {
            "in_features": self.linear.in_features,
            "num_classes": self.shape[0],
            "out_features": self.shape[1:],
            "bias": self.linear.bias is not None,
            **self.options,
            "options": None,
        }
        return ", ".join(f"{name}={fact}" for name, fact in facts.items())


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
    """Return the signature of a function; that of a builtin is the first line of its description."""
    try:
        return inspect.signature(function)
    except ValueError:
        arguments = function.__doc__.strip().splitlines()[0].partition("(")[2].rpartition(")")[0]
        return inspect.signature(eval(f"lambda {arguments}: None"))


functional = SimpleNamespace(**vars(torch.nn.functional))
nn = SimpleNamespace(**vars(torch.nn))
if not HAS_LINEAR_CROSS_ENTROPY:
    functional.linear_cross_entropy = _linear_cross_entropy
    nn.LinearCrossEntropyLoss = LinearCrossEntropyLoss
functional.mse_loss = _mse_loss
