"""What the arguments that PyTorch's function has must be, stated once.

The rules are in the order in which PyTorch's function checks, and an error has the class of PyTorch's.
"""

from numbers import Integral, Real
from typing import Any

from torch_aclnn_ops._checks import describe
from torch_aclnn_ops._torch_compat import public
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import lower_precision_autocast_dtype
from torch_aclnn_ops.functional.linear_cross_entropy._fsdp import check_not_fsdp1_shard
from torch_aclnn_ops.functional.linear_cross_entropy.torch_function import (
    TorchArguments,
    call_torch,
    class_weight_dtypes,
    flatten_rows,
    has_loss_dtype,
)

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
_TENSORS = TorchArguments._fields[:5]
_OPTIONAL = ("linear_bias", "weight")
_REAL = (float, Real)  # float first, for speed
_INTEGRAL = (int, Integral)
_INDEX_DTYPES = (torch.int64, torch.uint8)
_Broken = tuple[str, str, str, type[Exception]] | None  # name, what it must, what it does, class of the error


def check_arguments(given: TorchArguments, classes: int | None = None) -> None:
    """Raise for the first argument that breaks a rule.

    Args:
        given: Tensors that :func:`is_left_to_torch` does not leave to torch, or objects that are no tensors.
        classes: The size of the full vocabulary if the head is a shard.
    """
    broken = _tensors(given) or _products(given) or _options(given, classes) or _targets(given, classes)
    if broken is not None:
        name, accepted, found, error = broken
        raise error(f"linear_cross_entropy: {name} must {accepted}, but it {found}")


def _tensors(given: TorchArguments) -> _Broken:
    device = None
    tensors: tuple[Any, ...] = given[:5]
    for name, tensor in zip(_TENSORS, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            if tensor is None and name in _OPTIONAL:
                continue
            accepted = "be None or a Tensor" if name in _OPTIONAL else "be a Tensor"
            return name, accepted, f"is {describe(tensor)}", TypeError
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            return name, f"be on {device}, as input is", f"is on {tensor.device}", RuntimeError
        if name != "target" and not tensor.is_floating_point():
            return name, "have a floating-point dtype", f"has {tensor.dtype}", RuntimeError
    return None


def _products(given: TorchArguments) -> _Broken:
    input, head, bias = given.input, given.linear_weight, given.linear_bias
    rows, features = input.dim() - 1, input.shape[-1:]
    if rows < 0:
        return "input", "have shape (H,), (N, H) or (B, T, H)", "has no dimension", RuntimeError
    if head.dim() < 2 or head.shape[-1:] != features or (head.dim() > 2 and rows != 1):
        check_not_fsdp1_shard(head)
        shape = ", ".join(map(str, features))
        accepted = f"have shape (C, {shape})" + f" or (C, d_1, ..., d_K, {shape})" * (rows == 1)
        looks_like_logits = head.dim() == 2 and head.shape[:1] == features
        hint = "; pass hidden states, not logits, as input, and linear_weight with shape (C, H)"
        return "linear_weight", accepted, f"has shape {list(head.shape)}{hint * looks_like_logits}", RuntimeError
    if bias is not None and bias.shape != head.shape[:-1]:
        return "linear_bias", f"have shape {list(head.shape[:-1])}", f"has shape {list(bias.shape)}", RuntimeError
    for name, tensor in (("linear_weight", head), ("linear_bias", bias)):
        if tensor is not None and tensor.dtype is not input.dtype:
            if lower_precision_autocast_dtype(tensor) != lower_precision_autocast_dtype(input):
                return name, f"have dtype {input.dtype}, as input has", f"has {tensor.dtype}", RuntimeError
    return None


def _shape_of_probabilities(given: TorchArguments, classes: int | None) -> tuple[int, ...]:
    classes = given.linear_weight.shape[0] if classes is None else classes
    return (*given.input.shape[:-1], classes, *given.linear_weight.shape[1:-1])


def _options(given: TorchArguments, classes: int | None) -> _Broken:
    reduction, ignore_index, label_smoothing = given[5:]
    if ignore_index is not None and given.target.shape == _shape_of_probabilities(given, classes):
        return "ignore_index", "be None with probabilities as target", f"is {ignore_index}", RuntimeError
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        accepted = f"be one of {str(REDUCTIONS)[1:-1]}"
        return "reduction", accepted, f"is {describe(reduction)}", ValueError
    if ignore_index is not None and (not isinstance(ignore_index, _INTEGRAL) or isinstance(ignore_index, bool)):
        return "ignore_index", "be None or an int", f"is {describe(ignore_index)}", TypeError
    if not isinstance(label_smoothing, _REAL) or not 0 <= label_smoothing <= 1:
        error = RuntimeError if isinstance(label_smoothing, _REAL) else TypeError
        return "label_smoothing", "be a number from 0 to 1", f"is {describe(label_smoothing)}", error
    return None


def _targets(given: TorchArguments, classes: int | None) -> _Broken:
    input, head, target, _, weight, *_ = given
    classes = head.shape[0] if classes is None else classes
    if classes == 0:
        return "linear_weight", "have at least one class", f"has shape {list(head.shape)}", RuntimeError
    if weight is not None and weight.shape != (classes,):
        return "weight", f"have shape {[classes]}", f"has shape {list(weight.shape)}", RuntimeError
    if weight is not None and not has_loss_dtype(weight, input):
        return "weight", f"have dtype {class_weight_dtypes(input)}", f"has {weight.dtype}", RuntimeError
    of_indices = input.shape[:-1] + head.shape[1:-1]
    if target.shape == of_indices:
        if target.dtype not in _INDEX_DTYPES:
            accepted = "have dtype torch.int64 or torch.uint8, as class indices have"
            return "target", accepted, f"has {target.dtype}", RuntimeError
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            accepted = "not require grad with class indices as target, which have no derivative with respect to it"
            return "weight", accepted, "does", RuntimeError
        return None
    of_probabilities = _shape_of_probabilities(given, classes)
    if target.shape != of_probabilities:
        accepted = f"have shape {list(of_indices)} or {list(of_probabilities)} with an input of shape"
        # PyTorch's function compares the sizes of batches first.
        is_batch = input.dim() <= 2 and target.shape[:1] != of_indices[:1]
        error = ValueError if is_batch else RuntimeError
        return "target", f"{accepted} {list(input.shape)}", f"has shape {list(target.shape)}", error
    if not target.is_floating_point():
        return "target", "have a floating-point dtype, as probabilities have", f"has {target.dtype}", RuntimeError
    return None


def leave_to_torch(
    given: TorchArguments, torch_options: "LinearCrossEntropyOptions | None", own_options: dict[str, bool]
) -> Tensor:
    """Return the result of PyTorch's function.

    Args:
        given: Its arguments; batches of sequences are flattened.
        torch_options: Its ``options``.
        own_options: Which options that it lacks are given; it cannot compute them.
    """
    for name, is_given in own_options.items():
        if is_given:
            tensors = [one for one in given[:5] if isinstance(one, Tensor)]
            described = "; ".join(f"{type(one).__name__} of {one.dtype}, {one.layout}" for one in tensors)
            raise TypeError(
                f"linear_cross_entropy: {name} must not be given with arguments that are left to torch's function:"
                " tensor subclasses, sparse tensors, heads of no positions, one row with a target of shape (1,), and"
                f" probabilities with class weights of another dtype; they are {described}"
            )
    is_batch = isinstance(given.input, Tensor) and given.input.dim() > 2
    if is_batch or public.linear_cross_entropy is None:
        check_arguments(given)
    if not is_batch:
        return call_torch(given, torch_options)
    loss = call_torch(flatten_rows(given), torch_options)
    return loss.reshape(given.input.shape[:-1]) if loss.dim() > 0 else loss
