"""Calls that are passed to PyTorch's function, and errors that name the argument where PyTorch's would not."""

from numbers import Real
from typing import NoReturn

from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import (
    check_reduction,
    check_tensors,
    is_ordinary,
    lower_precision_autocast_dtype,
    overrides_torch,
)
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.torch_function import (
    REDUCTIONS,
    TorchArguments,
    call_torch,
    class_weight_dtypes,
    has_loss_dtype,
)
from torch_aclnn_ops.functional.linear_cross_entropy._fsdp import check_not_fsdp1_shard

import torch
from torch import Tensor


def call_torch_or_raise(
    given: TorchArguments,
    classes: int | None,
    torch_options: "LinearCrossEntropyOptions | None",
    **own_options: bool,
) -> Tensor:
    """Return the result of PyTorch's function, or raise its error or a clearer one.

    Args:
        given: The arguments of PyTorch's function.
        classes: Size of the full vocabulary if the head is a shard.
        torch_options: Its ``options``.
        **own_options: Whether options that PyTorch's function lacks are given.
    """
    _check_types(given)
    _check_devices(given)
    check_not_fsdp1_shard(given.linear_weight)
    if isinstance(given.input, Tensor) and given.input.dim() > 2:  # more than PyTorch supports
        _check_rows(given, classes)
    if not is_disabled():
        _check_products(given)
    _check_class_weight(given)
    if classes is not None:
        _raise_shard_error(given, classes)
    try:
        loss = call_torch(given, torch_options)
    except Exception as error:
        _add_reason(error, given)
        raise
    _check_no_own_options(**own_options)
    return loss


def _add_reason(error: Exception, given: TorchArguments) -> None:
    """Append to an error of PyTorch which argument is wrong, and what is accepted."""
    tensors = [tensor for tensor in given[:5] if tensor is not None]
    are_plain = all([isinstance(tensor, Tensor) and not overrides_torch(tensor) for tensor in tensors])
    if are_plain and given.linear_weight.dim() == 2 and given.input.dim() in (1, 2):
        try:
            _check_rows(given)
        except (RuntimeError, TypeError, ValueError) as reason:
            without_arguments = str(error).partition("\nlinear_cross_entropy was called with")[0]
            error.args = (f"{without_arguments}\n{reason}",)


def call_torch_on_rows(given: TorchArguments, torch_options: "LinearCrossEntropyOptions | None") -> Tensor:
    """Return the result of PyTorch's function, which takes no batches, on the rows of supported arguments."""
    input, target = given.input, given.target
    if input.dim() > 2:
        target = target.flatten(0, input.dim() - 2)
        given = given._replace(input=input.flatten(0, -2), target=target)
    loss = call_torch_or_raise(given, None, torch_options)
    return loss.reshape(input.shape[:-1]) if input.dim() > 2 and loss.dim() > 0 else loss


def _check_rows(given: TorchArguments, classes: int | None = None) -> None:
    """Check the arguments of a head with two dimensions.

    ``classes`` is the size of the full vocabulary if the head is a shard.
    """
    input, head, target, bias, weight, reduction, ignore_index, label_smoothing = given
    for name, tensor in zip(given._fields[:5], given[:5], strict=True):
        if tensor is not None or name not in ("linear_bias", "weight"):
            _check_tensor(name, tensor, input)
    rows, features = input.shape[:-1], input.shape[-1]
    described = f"has shape {list(head.shape)}"
    hint = _hint_of_shapes(input, head)
    is_right = head.dim() == 2 and head.shape[1] == features
    _check("linear_weight", is_right, f"have shape (C, {features})", described + hint)
    classes = head.shape[0] if classes is None else classes
    _check("linear_weight", classes > 0, "have at least one class", described)
    for name, tensor, size in (("linear_bias", bias, head.shape[0]), ("weight", weight, classes)):
        if tensor is not None:
            _check(name, tensor.shape == (size,), f"have shape {[size]}", f"has shape {list(tensor.shape)}")
    if weight is not None:
        accepted = f"have dtype {class_weight_dtypes(input)}"
        _check("weight", has_loss_dtype(weight, input), accepted, f"has {weight.dtype}")
    _check("reduction", reduction in REDUCTIONS, f"be one of {str(REDUCTIONS)[1:-1]}", f"is {reduction!r}", ValueError)
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


def _check_products(given: TorchArguments) -> None:
    """Raise for features and dtypes that do not match, for which PyTorch's error does not name the argument."""
    input, head, bias = given.input, given.linear_weight, given.linear_bias
    if any([tensor is not None and overrides_torch(tensor) for tensor in (input, head, bias)]):
        return
    for name, tensor in (("linear_weight", head), ("linear_bias", bias)):
        if tensor is not None:
            fits = lower_precision_autocast_dtype(tensor) == lower_precision_autocast_dtype(input)
            is_right = fits or input.is_floating_point()
            _check("input", is_right, "have a floating-point dtype", f"has {input.dtype}")
            _check(name, fits, f"have dtype {input.dtype}, as input has", f"has {tensor.dtype}")
    if input.dim() > 0 and head.dim() > 1:
        is_right = input.shape[-1] == head.shape[-1]
        accepted = f"have input's {input.shape[-1]} features in its last dimension"
        _check("linear_weight", is_right, accepted, f"has shape {list(head.shape)}{_hint_of_shapes(input, head)}")


def _hint_of_shapes(input: Tensor, head: Tensor) -> str:
    """Return what to pass if the input looks like logits of the head, or the head is transposed."""
    fits_classes = head.dim() == 2 and input.shape[-1] == head.shape[0]
    return "; pass hidden states, not logits, as input, and linear_weight with shape (C, H)" if fits_classes else ""


def _check_types(given: TorchArguments) -> None:
    """Raise for types for which PyTorch's error would not name the argument."""
    tensors = dict(zip(given._fields[:5], given[:5], strict=True))
    check_tensors("linear_cross_entropy", ("linear_bias", "weight"), **tensors)
    check_reduction("linear_cross_entropy", given.reduction)


def _check_devices(given: TorchArguments) -> None:
    """Raise for a head on another device: of one on "meta", torch computes a number."""
    device = given.input.device
    for name in ("linear_weight", "linear_bias"):
        tensor = getattr(given, name)
        if tensor is not None:
            _check(name, tensor.device == device, f"be on {device}, as input is", f"is on {tensor.device}")


def _check_class_weight(given: TorchArguments) -> None:
    """Raise for a class weight with the dtype of neither input nor loss, for which PyTorch's error does not name it."""
    input, linear_weight, target, _, weight, *_ = given
    if weight is None or overrides_torch(weight) or not is_ordinary(input, weight) or target.is_floating_point():
        return
    if lower_precision_autocast_dtype(linear_weight) != lower_precision_autocast_dtype(input):
        return  # torch multiplies them first
    if not has_loss_dtype(weight, input):
        accepted = class_weight_dtypes(input)
        raise RuntimeError(f"linear_cross_entropy: weight must have dtype {accepted}, but it has {weight.dtype}")


def _raise_shard_error(given: TorchArguments, classes: int) -> NoReturn:
    """Raise the error that PyTorch raises for an unsharded head."""
    linear_weight, linear_bias = given.linear_weight, given.linear_bias
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: linear_bias must have shape {list(linear_weight.shape[:-1])}, as linear_weight has"
            f" on this rank, but its shape is {list(linear_bias.shape)}"
        )
    unsharded = linear_weight.new_zeros((1,) * linear_weight.dim()).expand(classes, *linear_weight.shape[1:])
    call_torch(given._replace(linear_weight=unsharded, linear_bias=None))
    tensors = (given.input, linear_weight, linear_bias, given.weight, given.target)
    described = [f"{type(t).__name__} of {t.dtype}, {t.layout}" for t in tensors if t is not None]
    raise TypeError(
        "linear_cross_entropy: input, linear_weight, linear_bias and weight must be strided floating-point tensors"
        " if process_group is given, and target must be a plain tensor, but the arguments are"
        f" {'; '.join(described)}"
    )


def _check_no_own_options(**is_given: bool) -> None:
    """Raise if an argument is given that PyTorch's function, to which the call fell back, does not have."""
    for name, given in is_given.items():
        if given:
            raise TypeError(
                f"linear_cross_entropy: {name} must not be given with tensor subclasses, for which the call falls back"
                " to torch's function; pass plain tensors"
            )
