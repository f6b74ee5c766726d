"""The rules of the arguments, each stated once, and the calls that are left to PyTorch's function of the same name.

An error has the class of PyTorch's.
"""

from collections.abc import Collection, Iterator, Sequence
from numbers import Integral, Real
from typing import Any

from torch_aclnn_ops._call_log import Implementation, log_call
from torch_aclnn_ops._checks import check_bool, check_memory, check_shift, describe
from torch_aclnn_ops._tensors import accumulation_dtype
from torch_aclnn_ops._torch_compat import public
from torch_aclnn_ops._torch_compat.public import Buffer, LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import (
    call_torch_function,
    float32_autocast_dtype,
    lower_precision_autocast_dtype,
    overrides_torch,
    why_left_to_torch,
)
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput
from torch_aclnn_ops.functional.linear_cross_entropy.sharded_head import FSDP1
from torch_aclnn_ops.ops.linear_cross_entropy.call import NAME, NUMBERS, Call, check_numbers

import torch
from torch import Tensor
from torch.nn import Parameter

REDUCTIONS = ("none", "mean", "sum")
# Options that torch's function lacks, in addition to token_weight; their defaults change nothing. Adjacent fields of a
# call.
_OPTIONS = (*NUMBERS, "zero_if_all_ignored", "outputs")
_PLACES = slice(Call._fields.index(_OPTIONS[0]), Call._fields.index(_OPTIONS[-1]) + 1)
assert [*Call._fields][_PLACES] == [*_OPTIONS]
_DEFAULTS = tuple([Call._field_defaults[name] for name in _OPTIONS])
_TYPES = [type(default) for default in _DEFAULTS]
_OUTPUTS = LinearCrossEntropyOutput._fields[1:]
_OUTPUTS_OF_INDICES = ("log_probabilities", "token_accuracy")
_REAL = (float, Real)  # float first, for speed
_INTEGRAL = (int, Integral)
_INDEX_DTYPES = (torch.int64, torch.uint8)
# The name of an argument, its rule, how it breaks the rule, and the class of the error.
_Broken = Iterator[tuple[str, str, str, type[Exception]]]


def tensors_of(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the tensors that PyTorch's function takes."""
    return call.input, call.linear_weight, call.target, call.linear_bias, call.weight


def check_arguments(call: Call, classes: int | None = None) -> None:
    """Raise for an argument that breaks a rule.

    Args:
        call: A call as given, whose tensors may be other objects.
        classes: The size of the full vocabulary if the head is a shard.
    """
    for rules in (_broken_tensors(call), _broken_options(call), _broken_shapes(call, classes)):
        for name, accepted, found, error in rules:
            raise error(f"{NAME}: {name} must {accepted}, but it {found}")


def _broken_tensors(call: Call) -> _Broken:
    input: Any = call.input
    names = ("input", "linear_weight", "target", "linear_bias", "weight")
    tensors: tuple[Any, ...] = tensors_of(call)
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            is_optional = name in ("linear_bias", "weight")
            if tensor is not None or not is_optional:
                yield name, f"be {'None or ' * is_optional}a Tensor", f"is {describe(tensor)}", TypeError
            continue
        if tensor.device != input.device:
            yield name, f"be on {input.device}, as input is", f"is on {tensor.device}", RuntimeError
        if name == "target":
            continue
        if not tensor.is_floating_point():
            yield name, "have a floating-point dtype", f"has {tensor.dtype}", RuntimeError
        if name == "weight" and not _has_loss_dtype(tensor, input):
            dtypes = dict.fromkeys((input.dtype, accumulation_dtype(input.dtype)))
            yield name, f"have dtype {' or '.join(map(str, dtypes))}", f"has {tensor.dtype}", RuntimeError
        if name != "weight" and tensor.dtype is not input.dtype:
            if lower_precision_autocast_dtype(tensor) != lower_precision_autocast_dtype(input):
                yield name, f"have dtype {input.dtype}, as input has", f"has {tensor.dtype}", RuntimeError


def _has_loss_dtype(weight: Tensor, input: Tensor) -> bool:
    """Return whether a class weight has the dtype of the logits or of the loss, or is cast to it by autocast."""
    if float32_autocast_dtype(input) != lower_precision_autocast_dtype(input):
        return float32_autocast_dtype(weight) == torch.float32
    return weight.dtype in (input.dtype, accumulation_dtype(input.dtype))


def _broken_options(call: Call) -> _Broken:
    reduction, ignore_index, label_smoothing = call.reduction, call.ignore_index, call.label_smoothing
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        yield "reduction", f"be one of {str(REDUCTIONS)[1:-1]}", f"is {describe(reduction)}", ValueError
    if ignore_index is not None and (not isinstance(ignore_index, _INTEGRAL) or isinstance(ignore_index, bool)):
        yield "ignore_index", "be None or an int", f"is {describe(ignore_index)}", TypeError
    if not isinstance(label_smoothing, _REAL) or not 0 <= label_smoothing <= 1:
        error = RuntimeError if isinstance(label_smoothing, _REAL) else TypeError
        yield "label_smoothing", "be a number from 0 to 1", f"is {describe(label_smoothing)}", error


def _broken_shapes(call: Call, classes: int | None) -> _Broken:
    input, head, bias, target, weight, *_ = call
    rows, features = input.shape[:-1], input.shape[-1:]
    if input.dim() == 0:
        yield "input", "have shape (H,), (N, H) or (B, T, H)", "has no dimension", RuntimeError
    if head.dim() != 2 or head.shape[1:] != features:
        hint = f"; {FSDP1}" if head.dim() == 1 else ""
        if head.dim() == 2 and head.shape[:1] == features:
            hint = "; pass hidden states, not logits, as input, and linear_weight with shape (C, H)"
        accepted = f"have shape (C, {', '.join(map(str, features))})"
        yield "linear_weight", accepted, f"has shape {list(head.shape)}{hint}", RuntimeError
    classes = head.shape[0] if classes is None else classes
    if classes == 0:
        yield "linear_weight", "have at least one class", f"has shape {list(head.shape)}", RuntimeError
    for name, tensor, size in (("linear_bias", bias, head.shape[0]), ("weight", weight, classes)):
        if tensor is not None and tensor.shape != (size,):
            yield name, f"have shape {[size]}", f"has shape {list(tensor.shape)}", RuntimeError
    if target.shape == rows:
        if target.dtype not in _INDEX_DTYPES:
            accepted = "have dtype torch.int64 or torch.uint8, as class indices have"
            yield "target", accepted, f"has {target.dtype}", RuntimeError
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            accepted = "not require grad with class indices as target, which have no derivative with respect to it"
            yield "weight", accepted, "does", RuntimeError
        return
    if target.shape != (*rows, classes):
        accepted = f"have shape {list(rows)} or {[*rows, classes]} with an input of shape {list(input.shape)}"
        error = ValueError if target.shape[:1] != rows[:1] else RuntimeError  # as torch
        yield "target", accepted, f"has shape {list(target.shape)}", error
    if not target.is_floating_point():
        yield "target", "have a floating-point dtype, as probabilities have", f"has {target.dtype}", RuntimeError
    if call.ignore_index is not None:
        yield "ignore_index", "be None with probabilities as target", f"is {call.ignore_index}", RuntimeError
    for name in _OUTPUTS_OF_INDICES:
        if name in call.outputs:
            accepted = f"not have {name} with probabilities as target, because it needs class indices"
            yield "outputs", accepted, f"is {sorted(call.outputs)}", ValueError


def has_default_options(call: Call) -> bool:
    """Return whether the options that PyTorch's function lacks have their defaults."""
    given: Any = call[_PLACES]
    # Types first: an array would compare its elements.
    return [type(option) for option in given] == _TYPES and bool(given == _DEFAULTS)


def check_own_options(call: Call) -> Call:
    """Return the call with the options that PyTorch's function lacks as Python's numbers, after checking them."""
    numbers = check_numbers(NAME, **{name: getattr(call, name) for name in NUMBERS})
    check_bool(NAME, "zero_if_all_ignored", call.zero_if_all_ignored)
    return call._replace(**numbers, outputs=_checked_outputs(call.outputs))


def own_options(call: Call) -> list[str]:
    """Return the names of the options that are given and that PyTorch's function lacks."""
    given = [name for name in _OPTIONS if getattr(call, name) != Call._field_defaults[name]]
    return given if call.token_weight is None else [*given, "token_weight"]


def _checked_outputs(outputs: Collection[str]) -> tuple[str, ...]:
    if isinstance(outputs, str) or not isinstance(outputs, Collection):
        raise TypeError(f"{NAME}: outputs must be a tuple of names, but it is {outputs!r}")
    for name in outputs:
        if name not in _OUTPUTS:
            raise ValueError(f"{NAME}: outputs must be among {', '.join(_OUTPUTS)}, but one is {name!r}")
    return tuple(outputs)


def checked_chunks(
    chunk_size: int | str, max_memory: int | None, options: "LinearCrossEntropyOptions | None"
) -> tuple[int | None, int | None]:
    """Return the rows of a chunk and the bytes of memory that are given, after checking them."""
    if options is None:
        return check_memory(NAME, chunk_size, max_memory)
    if LinearCrossEntropyOptions is None:
        raise TypeError(
            f"{NAME}: options={options!r} requires torch 2.13 or newer, but torch is {torch.__version__}; pass"
            " chunk_size instead"
        )
    if not isinstance(options, LinearCrossEntropyOptions):
        raise TypeError(f"{NAME}: options must be None or a LinearCrossEntropyOptions, but it is {options!r}")
    return check_memory(NAME, chunk_size, max_memory, options.batch_chunk_size)


def checked_shift(shift: object, call: Call) -> int:
    """Accept a number of places that is at most the length of a sequence, where labels can be shifted."""
    target: object = call.target
    places = check_shift(NAME, shift, target if isinstance(target, Tensor) else None)
    if places == 0:
        return 0
    if not isinstance(target, Tensor):  # torch's function, which takes what torch.fx traces, has no shift
        raise TypeError(f"{NAME}: target must be a Tensor if shift is given, but it is {describe(target)}")
    if target.is_floating_point() or call.linear_weight.dim() > 2:
        raise ValueError(f"{NAME}: shift must be 0 unless target has the class indices of sequences, but it is {shift}")
    return places


_TENSOR_TYPES = (Tensor, Parameter, Buffer, type(None))


def any_subclass(tensors: Sequence[object]) -> bool:
    """Return whether an argument is neither None nor a tensor, or is of a subclass of tensors."""
    for tensor in tensors:  # faster than any()
        if type(tensor) not in _TENSOR_TYPES:
            return True
    return False


def to_loss_dtype(input: Tensor, weight: Tensor) -> Tensor:
    """Cast weights of classes or rows to the dtype in which losses are computed."""
    return weight.to(accumulation_dtype(lower_precision_autocast_dtype(input)))


def is_left_to_torch(call: Call) -> bool:
    """Return whether PyTorch's function takes a call: tensor subclasses, sparse tensors, heads with more dimensions."""
    for tensor in tensors_of(call):
        if type(tensor) not in _TENSOR_TYPES:
            if overrides_torch(tensor) if isinstance(tensor, Tensor) else hasattr(type(tensor), "__torch_function__"):
                return True
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            return True
    return isinstance(call.linear_weight, Tensor) and call.linear_weight.dim() > 2


def leave_to_torch(call: Call, torch_options: "LinearCrossEntropyOptions | None", own: Sequence[str]) -> Tensor:
    """Return the result of PyTorch's function, or of ``linear`` and ``cross_entropy`` if it does not exist.

    Args:
        call: Its arguments; batches of sequences, which it does not take, are flattened.
        torch_options: Its ``options``.
        own: The names of given options that it lacks; it cannot compute them.
    """
    if own:
        raise TypeError(
            f"{NAME}: {own[0]} must not be given with arguments that are left to torch's function: tensor subclasses,"
            " sparse tensors and heads of shape (C, d_1, ..., d_K, H)"
        )
    shape = call.input.shape[:-1] if isinstance(call.input, Tensor) else ()
    if len(shape) > 1:
        check_arguments(call)
        target = call.target.flatten(0, len(shape) - 1)
        call = call._replace(input=call.input.flatten(0, -2), target=target)
    loss = _call_torch(call, torch_options)
    return loss.reshape(shape) if len(shape) > 1 and loss.dim() > 0 else loss


def _call_torch(call: Call, torch_options: "LinearCrossEntropyOptions | None") -> Tensor:
    input, linear_weight, linear_bias, target, weight, _, reduction, ignore_index, label_smoothing, *_ = call
    if public.linear_cross_entropy is not None:
        return call_torch_function(
            public.linear_cross_entropy,
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=torch_options,
        )
    log_call(NAME, Implementation.TORCH, why_left_to_torch)
    head = linear_weight.reshape(-1, linear_weight.shape[-1])
    logits = torch.nn.functional.linear(input, head, None if linear_bias is None else linear_bias.reshape(-1))
    return torch.nn.functional.cross_entropy(
        logits.reshape(*input.shape[:-1], *linear_weight.shape[:-1]),
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=call.ignored_class(),
        label_smoothing=label_smoothing,
    )
