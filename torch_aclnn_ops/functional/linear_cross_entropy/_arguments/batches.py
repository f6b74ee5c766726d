"""Refusals of arguments with an input of shape (B, T, H), for which torch's function has no errors."""

from numbers import Real

from torch_aclnn_ops.functional._drop_in import is_ordinary, lower_precision_autocast_dtype, overrides_torch
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.torch_function import (
    REDUCTIONS,
    TorchArguments,
    class_weight_dtypes,
    has_loss_dtype,
)

import torch
from torch import Tensor


def check_batches(given: TorchArguments, classes: int | None = None) -> None:
    """Name the argument that is wrong, if the input has more dimensions than torch takes.

    ``classes`` are those of the whole vocabulary, where the head has only some of them.
    """
    input, head, target, bias, weight, reduction, ignore_index, label_smoothing = given
    if not isinstance(input, Tensor) or input.dim() < 3:
        return
    for name, tensor in zip(given._fields[:5], given[:5], strict=True):
        if tensor is not None or name not in ("linear_bias", "weight"):
            _check_tensor(name, tensor, input)
    rows, features = input.shape[:-1], input.shape[-1]
    described = f"has shape {list(head.shape)}"
    _check("linear_weight", head.dim() == 2 and head.shape[1] == features, f"have shape (C, {features})", described)
    classes = head.shape[0] if classes is None else classes
    _check("linear_weight", classes > 0, "have at least one class", described)
    for name, tensor, size in (("linear_bias", bias, head.shape[0]), ("weight", weight, classes)):
        if tensor is not None:
            _check(name, tensor.shape == (size,), f"have shape {[size]}", f"has shape {list(tensor.shape)}")
    if weight is not None:
        accepted = f"have dtype {class_weight_dtypes(input)}"
        _check("weight", has_loss_dtype(weight, input), accepted, f"has {weight.dtype}")
    _check("reduction", reduction in REDUCTIONS, f"be one of {REDUCTIONS}", f"is {reduction!r}", ValueError)
    accepted, described = "be a number from 0 to 1", f"is {label_smoothing!r}"
    _check("label_smoothing", isinstance(label_smoothing, Real), accepted, described, TypeError)
    _check("label_smoothing", 0 <= label_smoothing <= 1, accepted, described)
    accepted, described = "be None or an int", f"is {ignore_index!r}"
    _check("ignore_index", ignore_index is None or isinstance(ignore_index, int), accepted, described, TypeError)
    accepted = f"have shape {list(rows)} or {[*rows, classes]} with an input of shape {list(input.shape)}"
    _check("target", target.shape in (rows, (*rows, classes)), accepted, f"has shape {list(target.shape)}")
    if target.dim() == input.dim():
        _check("ignore_index", ignore_index is None, "be None with probabilities as target", described)
        accepted = "have a floating-point dtype, as probabilities have"
        _check("target", target.is_floating_point(), accepted, f"has {target.dtype}")
        return
    accepted = "have dtype torch.int64 or torch.uint8, as class indices have"
    _check("target", target.dtype in (torch.int64, torch.uint8), accepted, f"has {target.dtype}")
    if weight is not None:
        _check("weight", not weight.requires_grad, "not require grad with class indices as target", "does")


def _check_tensor(name: str, tensor: object, input: Tensor) -> None:
    is_plain = isinstance(tensor, Tensor) and not overrides_torch(tensor)
    described = f"is of {type(tensor)}" if isinstance(tensor, Tensor) else f"is {tensor!r}"
    _check(name, is_plain, "be a plain tensor", described, TypeError)
    assert isinstance(tensor, Tensor)
    described = f"has {tensor.dtype} and {tensor.layout}"
    if name != "target":
        _check(name, is_ordinary(tensor), "have a floating-point dtype and be strided", described, TypeError)
    _check(name, tensor.device == input.device, f"be on {input.device}, as input is", f"is on {tensor.device}")
    if name in ("linear_weight", "linear_bias"):
        fits = lower_precision_autocast_dtype(tensor) == lower_precision_autocast_dtype(input)
        _check(name, fits, f"have dtype {input.dtype}, as input has", f"has {tensor.dtype}")


def _check(name: str, is_right: bool, accepted: str, described: str, error: type[Exception] = RuntimeError) -> None:
    if not is_right:
        raise error(f"linear_cross_entropy: {name} must {accepted}, but it {described}")
