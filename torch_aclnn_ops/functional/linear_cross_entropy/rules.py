"""What the arguments must be, stated once.

The rules of the arguments that PyTorch's function has are in the order in which it checks, and an error has the class
of PyTorch's.
"""

from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from torch_aclnn_ops._checks import check_bool, describe
from torch_aclnn_ops._head_options import check_memory, check_shift
from torch_aclnn_ops._torch_compat import public
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import lower_precision_autocast_dtype
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.functional.linear_cross_entropy.sharded_head import check_not_fsdp1_shard
from torch_aclnn_ops.functional.linear_cross_entropy.torch_function import (
    call_torch,
    class_weight_dtypes,
    flatten_rows,
    has_loss_dtype,
    is_left_to_torch,
    tensors_of,
)
from torch_aclnn_ops.ops.linear_cross_entropy.call import NAME, NUMBERS, Call, check_numbers

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
_TENSORS = ("input", "linear_weight", "target", "linear_bias", "weight")
_OPTIONAL = ("linear_bias", "weight")
# What torch's function lacks, beside token_weight; with the defaults it computes the same.
_OPTIONS = (*NUMBERS, "zero_if_all_ignored", "outputs")
_DEFAULTS = [Call._field_defaults[name] for name in _OPTIONS]
_TYPES = [type(default) for default in _DEFAULTS]
_OUTPUTS = LinearCrossEntropyOutput._fields[1:]
_OUTPUTS_OF_INDICES = ("log_probabilities", "token_accuracy")
_REAL = (float, Real)  # float first, for speed
_INTEGRAL = (int, Integral)
_INDEX_DTYPES = (torch.int64, torch.uint8)
_Broken = tuple[str, str, str, type[Exception]] | None  # name, what it must, what it does, class of the error


def check_arguments(call: Call, classes: int | None = None) -> None:
    """Raise for the first argument that breaks a rule.

    Args:
        call: A call of tensors that :func:`is_left_to_torch` does not leave to torch, or objects that are no tensors.
        classes: The size of the full vocabulary if the head is a shard.
    """
    broken = _tensors(call) or _products(call) or _options(call, classes) or _targets(call, classes)
    if broken is not None:
        name, accepted, found, error = broken
        raise error(f"{NAME}: {name} must {accepted}, but it {found}")


def _tensors(call: Call) -> _Broken:
    device = None
    tensors: tuple[Any, ...] = tensors_of(call)
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


def _products(call: Call) -> _Broken:
    input, head, bias = call.input, call.linear_weight, call.linear_bias
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


def _shape_of_probabilities(call: Call, classes: int | None) -> tuple[int, ...]:
    classes = call.linear_weight.shape[0] if classes is None else classes
    return (*call.input.shape[:-1], classes, *call.linear_weight.shape[1:-1])


def _options(call: Call, classes: int | None) -> _Broken:
    reduction, ignore_index, label_smoothing = call.reduction, call.ignore_index, call.label_smoothing
    if ignore_index is not None and call.target.shape == _shape_of_probabilities(call, classes):
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


def _targets(call: Call, classes: int | None) -> _Broken:
    input, head, _, target, weight, *_ = call
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
    of_probabilities = _shape_of_probabilities(call, classes)
    if target.shape != of_probabilities:
        accepted = f"have shape {list(of_indices)} or {list(of_probabilities)} with an input of shape"
        # PyTorch's function compares the numbers of rows first.
        is_number = input.dim() == 2 and target.shape[:1] != of_indices[:1]
        is_number |= input.dim() == target.dim() == 1 and not target.is_floating_point()
        error = ValueError if is_number else RuntimeError
        return "target", f"{accepted} {list(input.shape)}", f"has shape {list(target.shape)}", error
    if not target.is_floating_point():
        return "target", "have a floating-point dtype, as probabilities have", f"has {target.dtype}", RuntimeError
    for name in _OUTPUTS_OF_INDICES:
        if name in call.outputs:
            accepted = f"not have {name} with probabilities as target, because it needs class indices"
            return "outputs", accepted, f"is {sorted(call.outputs)}", ValueError
    return None


def has_default_options(call: Call) -> bool:
    """Return whether the options that PyTorch's function lacks have their defaults."""
    given = [getattr(call, name) for name in _OPTIONS]
    # Types first: an array would compare its elements.
    return [type(option) for option in given] == _TYPES and given == _DEFAULTS


def check_own_options(call: Call) -> Call:
    """Return the call with the options that PyTorch's function lacks as Python's numbers, after checking them."""
    if has_default_options(call):
        return call
    numbers = check_numbers(NAME, **{name: getattr(call, name) for name in NUMBERS})
    check_bool(NAME, "zero_if_all_ignored", call.zero_if_all_ignored)
    return call._replace(**numbers, outputs=_checked_outputs(call.outputs))


def checked_chunks(
    chunk_size: int | str, max_memory: int | None, options: "LinearCrossEntropyOptions | None"
) -> tuple[int | None, int | None]:
    """Return the rows of a chunk and the bytes of memory that are given, after checking them."""
    if options is not None:
        _check_torch_options(options)
    return check_memory(NAME, chunk_size, max_memory, None if options is None else options.batch_chunk_size)


def checked_shift(shift: object, call: Call) -> int:
    """Accept a number of places that is at most the length of a sequence, where labels can be shifted."""
    target: object = call.target
    places = check_shift(NAME, shift, target if isinstance(target, Tensor) else None)
    if places == 0 or not isinstance(target, Tensor):  # which torch refuses
        return 0
    if target.is_floating_point():
        raise ValueError(
            f"{NAME}: shift must be 0 with probabilities as target, because only class indices can mark"
            f" the rows without a label as ignored, but it is {shift}"
        )
    if call.linear_weight.dim() > 2:
        raise ValueError(
            f"{NAME}: shift must be 0 with a linear_weight of shape (C, d_1, ..., d_K, H), but it is {shift}"
        )
    return places


def _check_torch_options(options: object) -> None:
    if LinearCrossEntropyOptions is None:
        raise TypeError(
            f"{NAME}: options={options!r} requires torch 2.13 or newer, but torch is {torch.__version__}; pass"
            " chunk_size instead"
        )
    if not isinstance(options, LinearCrossEntropyOptions):
        raise TypeError(f"{NAME}: options must be None or a LinearCrossEntropyOptions, but it is {options!r}")


def _checked_outputs(outputs: Collection[str]) -> tuple[str, ...]:
    if isinstance(outputs, str) or not isinstance(outputs, Collection):
        raise TypeError(f"{NAME}: outputs must be a tuple of names, but it is {outputs!r}")
    for name in outputs:
        if name not in _OUTPUTS:
            raise ValueError(f"{NAME}: outputs must be among {', '.join(_OUTPUTS)}, but one is {name!r}")
    return tuple(outputs)


def own_options(call: Call) -> list[str]:
    """Return the names of the options that are given and that PyTorch's function lacks."""
    given = [name for name, default in zip(_OPTIONS, _DEFAULTS, strict=True) if getattr(call, name) != default]
    return given if call.token_weight is None else [*given, "token_weight"]


def leave_to_torch(call: Call, torch_options: "LinearCrossEntropyOptions | None", own: Collection[str]) -> Tensor:
    """Return the result of PyTorch's function.

    Args:
        call: Its arguments; batches of sequences are flattened.
        torch_options: Its ``options``.
        own: The names of given options that it lacks; it cannot compute them.
    """
    for name in own:
        tensors = [one for one in tensors_of(call) if isinstance(one, Tensor)]
        described = "; ".join(f"{type(one).__name__} of {one.dtype}, {one.layout}" for one in tensors)
        raise TypeError(
            f"{NAME}: {name} must not be given with arguments that are left to torch's function: tensor subclasses,"
            " sparse tensors, heads of no positions, one row with a target of shape (1,), and probabilities with class"
            f" weights of another dtype; they are {described}"
        )
    is_batch = isinstance(call.input, Tensor) and call.input.dim() > 2
    if is_batch or (public.linear_cross_entropy is None and not is_left_to_torch(call)):
        check_arguments(call)
    if not is_batch:
        return call_torch(call, torch_options)
    loss = call_torch(flatten_rows(call), torch_options)
    return loss.reshape(call.input.shape[:-1]) if loss.dim() > 0 else loss
