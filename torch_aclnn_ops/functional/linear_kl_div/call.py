"""One call of ``linear_kl_div``: the carrier of its arguments, their checks, and the chunks of its rows."""

from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

from torch_aclnn_ops._checks import AT_LEAST_1, Divergence, check_number, describe, values_are_readable
from torch_aclnn_ops._tensors import accumulation_dtype, is_dtensor
from torch_aclnn_ops.functional._drop_in import lower_precision_autocast_dtype, overrides_torch
from torch_aclnn_ops.functional._head.arguments import check_constant, flat, rounded_by_autocast
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.ops import _tiling as tiling
from torch_aclnn_ops.ops._chunks import has_bfloat16_units
from torch_aclnn_ops.ops._tiling import Sizes, Tiling

import torch
from torch import Tensor

NAME = "linear_kl_div"
# Tensors of a block's size that a block needs at once; two more for labels.
_TEMPORARIES = {"forward_kl": 6, "reverse_kl": 6, "jensen_shannon": 9}


class Call(NamedTuple):
    """One call with checked arguments: rows in one dimension, and one teacher.

    The teacher's distribution of every row is that of a head; or probabilities of all classes, log-probabilities if
    ``is_log``; or log-probabilities of the classes at ``teacher_indices``, where the others share the rest.
    """

    input: Tensor  # shape (N, H)
    linear_weight: Tensor  # shape (V, H)
    linear_bias: Tensor | None  # shape (V,)
    target: Tensor | None  # ``IGNORED`` for an ignored row, else the label if it counts or 0, shape (N,)
    teacher_input: Tensor | None  # shape (N, H_t)
    teacher_weight: Tensor | None  # shape (V, H_t)
    teacher_bias: Tensor | None  # shape (V,)
    teacher_values: Tensor | None = None  # shape (N, V), or (N, k) with indices
    teacher_indices: Tensor | None = None  # shape (N, k)
    is_log: bool = True
    divergence: Divergence = "forward_kl"
    beta: float = 0.5  # the teacher's weight in the Jensen-Shannon divergence
    hard_weight: float = 0.0  # factor of the cross entropy of the labels, which is added
    temperature: float = 1.0
    chunk_size: int | None = None
    max_memory: int | None = None
    ignore_index: int = -100
    token_weight: Tensor | None = None  # shape of the rows
    reduction: str = "mean"
    zero_if_all_ignored: bool = False
    gradients: tuple[bool, bool, bool] = (False, False, False)  # which of input, linear_weight and linear_bias need one
    recomputes: bool = False  # whether the gradients alone are computed, in a backward pass
    shards: VocabularyShards | None = None  # how processes share the vocabulary, if they do
    reduce_input_grad: bool = True  # sum the gradient of the input over these processes

    def labels(self) -> Tensor | None:
        """Return the labels whose cross entropy is added, or ``None`` without ``hard_weight``."""
        return self.target if self.hard_weight else None

    def may_be_masked(self) -> bool:
        """Return whether classes may have a probability of 0."""
        return self.linear_bias is not None or self.teacher_weight is None or self.teacher_bias is not None

    def classes(self) -> slice:
        """Return the classes of this process, in the vocabulary."""
        return slice(0, self.linear_weight.shape[0]) if self.shards is None else self.shards.own

    def has_small_blocks(self) -> bool:
        """Return whether the rows of a chunk are reduced a few at a time, so that they stay in a CPU's cache.

        Otherwise all of them are reduced at once: on a device to save launches, and where processes share a vocabulary
        to save collectives.
        """
        return self.linear_weight.is_cpu and self.shards is None

    def tile_rows(self, rows: int) -> Tiling:
        """Divide rows into chunks, or raise for a ``max_memory`` that is too small.

        Processes that share a vocabulary have one collective for each chunk, and so need the same chunks.
        """
        weight, is_shared = self.linear_weight, self.shards is not None
        classes = weight.shape[0] if self.shards is None else max(self.shards.sizes)
        copies = 1 if self.teacher_indices is not None else 2
        if not self.has_small_blocks():
            copies += _TEMPORARIES[self.divergence] + 2 * (self.labels() is not None)
        sizes = Sizes(rows, classes, weight.shape[1], weight.dtype, weight.is_cpu)
        limits = self.chunk_size, self.max_memory
        units = not is_shared and has_bfloat16_units(weight)
        found = tiling.tile_rows(NAME, sizes, *limits, copies, self.gradients[1] or is_shared, units)
        return replace(found, classes=weight.shape[0]) if is_shared else found

    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of the losses."""
        return accumulation_dtype(self.input.dtype)


# By default, the gradient of full_tensor() would lack what the rows of other ranks contribute.
REMEDY = (
    'if it is sharded by fully_shard (FSDP2), pass its full_tensor(grad_placements=[Partial("avg")]), of a teacher'
    f" its full_tensor().detach(), or call {NAME} in the forward pass of the module that is sharded with it; if the"
    " ranks share the vocabulary, and all have the same input, pass its to_local() with process_group"
)
_TEACHERS = "teacher_input and teacher_weight, or teacher_log_probs, or teacher_probs, or teacher_top_k"


def check(name: str, is_right: bool, accepted: str, described: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` with the message that all arguments share, unless ``is_right``."""
    if not is_right:
        raise error(f"{NAME}: {name} must {accepted}, but it {described}")


def check_layer(names: tuple[str, str, str], rows: Any, weight: Any, bias: Any, input: Tensor) -> None:
    """Check the rows, the weight and the bias of a head, which have these names; ``input`` has the student's rows."""
    of_rows, of_weight, of_bias = names
    for name, tensor in zip(names, (rows, weight, bias), strict=True):
        if tensor is not None or name != of_bias:
            _check_tensor(name, tensor, input)
            if tensor.dtype != rows.dtype:
                fits = lower_precision_autocast_dtype(tensor) == lower_precision_autocast_dtype(rows)
                check(name, fits, f"have dtype {rows.dtype}, as {of_rows} has", f"has {tensor.dtype}", TypeError)
    check(of_rows, rows.dim() >= 1, "have shape (H,), (N, H) or (B, T, H)", "has no dimension")
    features = rows.shape[-1]
    fits = weight.dim() == 2 and weight.shape[1] == features
    accepted = f"have shape (V, {features}), where {of_rows} has {features} features"
    check(of_weight, fits, accepted, f"has shape {list(weight.shape)}")
    classes = weight.shape[0]
    check(of_weight, classes > 0, "have at least one class", "has none")
    if bias is not None:
        check(of_bias, bias.shape == (classes,), f"have shape [{classes}]", f"has shape {list(bias.shape)}")


def _check_tensor(name: str, tensor: object, input: Tensor, is_floating: bool = True) -> None:
    if not isinstance(tensor, Tensor) or overrides_torch(tensor):
        described = f"is of {type(tensor)}" if isinstance(tensor, Tensor) else f"is {describe(tensor)}"
        described = f"is a DTensor; {REMEDY}" if is_dtensor(tensor) else described
        check(name, False, "be a plain tensor", described, TypeError)
    assert isinstance(tensor, Tensor)
    if is_floating and not (tensor.is_floating_point() and tensor.layout is torch.strided):
        described = f"has {tensor.dtype} and {tensor.layout}"
        check(name, False, "have a floating-point dtype and be strided", described, TypeError)
    if tensor.device != input.device:
        check(name, False, f"be on {input.device}, as input is", f"is on {tensor.device}", RuntimeError)


def first_classes(vocab_size: int, dim: int, *tensors: Any) -> tuple[Any, ...]:
    """Return the first classes of tensors, in dimension ``dim``; arguments that are not tensors are checked later."""
    number = check_number(NAME, "vocab_size", vocab_size, AT_LEAST_1)
    found = []
    for tensor in tensors:
        is_tensor = isinstance(tensor, Tensor) and tensor.dim() > 0 and not is_dtensor(tensor)
        size = tensor.shape[dim] if is_tensor else number
        check("vocab_size", number <= size, f"be at most the {size} classes of every head", f"is {vocab_size}")
        found.append(tensor.narrow(dim, 0, number) if is_tensor else tensor)
    return tuple(found)


def with_teacher(call: Call, log_probs: Any, probs: Any, top_k: Any) -> Call:
    """Return the call with its teacher, which must be given in exactly one way and gets no gradient."""
    input = call.input
    has_head = any([one is not None for one in (call.teacher_input, call.teacher_weight, call.teacher_bias)])
    given = [has_head, log_probs is not None, probs is not None, top_k is not None]
    if sum(given) != 1:
        raise TypeError(f"{NAME}: one of {_TEACHERS} must be given, but {sum(given) or 'none'} are")
    name, values = ("teacher_probs", probs) if log_probs is None else ("teacher_log_probs", log_probs)
    if has_head:
        call = _with_head(call)
    elif top_k is not None:
        name, call = "teacher_top_k[1]", _with_top_k(call, top_k)
    else:
        _check_tensor(name, values, input)
        shape = (*input.shape[:-1], call.linear_weight.shape[0])
        check(name, values.shape == shape, f"have shape {list(shape)}", f"has shape {list(values.shape)}")
        call = call._replace(teacher_values=flat(values), is_log=log_probs is not None)
    names = ("teacher_input", "teacher_weight", "teacher_bias", name)
    tensors = (call.teacher_input, call.teacher_weight, call.teacher_bias, call.teacher_values)
    for label, tensor in zip(names, tensors, strict=True):
        if tensor is not None:
            check_constant(NAME, label, tensor, "a teacher")
    return call


def _with_head(call: Call) -> Call:
    """Check a teacher that is given as the input, weight and bias of its head."""
    input, shape = call.input, call.input.shape[:-1]
    rows: Any = call.teacher_input
    weight: Any = call.teacher_weight
    bias = call.teacher_bias
    check_layer(("teacher_input", "teacher_weight", "teacher_bias"), rows, weight, bias, input)
    accepted = f"have the shape of input, {list(shape)}, before its features"
    check("teacher_input", rows.shape[:-1] == shape, accepted, f"has shape {list(rows.shape)}")
    classes, described = call.linear_weight.shape[0], f"has {weight.shape[0]}"
    check("teacher_weight", weight.shape[0] == classes, f"have {classes} classes, as linear_weight has", described)
    rows, weight, bias = rounded_by_autocast(rows, weight, bias)
    return call._replace(teacher_input=flat(rows), teacher_weight=weight, teacher_bias=bias)


def _with_top_k(call: Call, top_k: Any) -> Call:
    """Check a teacher that is given as its most likely classes and their log-probabilities."""
    is_pair = isinstance(top_k, (tuple, list)) and len(top_k) == 2
    accepted = "be a pair of tensors, classes and their log-probabilities"
    check("teacher_top_k", is_pair, accepted, f"is {describe(top_k)}", TypeError)
    input, (indices, values) = call.input, top_k
    _check_tensor("teacher_top_k[0]", indices, input, is_floating=False)
    _check_tensor("teacher_top_k[1]", values, input)
    is_index = indices.dtype in (torch.int64, torch.int32)
    check("teacher_top_k[0]", is_index, "have dtype torch.int64 or torch.int32", f"has {indices.dtype}", TypeError)
    accepted, described = f"have shape {[*input.shape[:-1], 'k']}", f"has shape {list(indices.shape)}"
    fits = indices.dim() == input.dim() and indices.shape[:-1] == input.shape[:-1] and indices.shape[-1] > 0
    check("teacher_top_k[0]", fits, accepted, described)
    accepted, described = f"have shape {list(indices.shape)}, as teacher_top_k[0] has", f"has {list(values.shape)}"
    check("teacher_top_k[1]", values.shape == indices.shape, accepted, described)
    return call._replace(teacher_values=flat(values), teacher_indices=flat(indices).long())


def check_classes(indices: Tensor, ignored: Tensor | None, classes: int) -> Tensor:
    """Return which rows repeat a class or have an invalid one; raise for them where values can be read."""
    ordered = indices.sort(1).values
    is_wrong = (ordered[:, 0] < 0) | (ordered[:, -1] >= classes)
    is_twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if ignored is not None:
        is_wrong, is_twice = is_wrong & ~ignored, is_twice & ~ignored
    if values_are_readable(indices):
        _raise_for_rows(indices, is_wrong, f"classes from 0 to {classes - 1}", IndexError)
        _raise_for_rows(indices, is_twice, "each class of a row once", ValueError)
    return is_wrong | is_twice


def _raise_for_rows(indices: Tensor, rows: Tensor, accepted: str, error: type[Exception]) -> None:
    if bool(rows.any()):
        check("teacher_top_k[0]", False, f"have {accepted}", f"has the row {indices[rows][0].tolist()}", error)


def check_labels(target: Tensor, ignored: Tensor, classes: int, may_raise: bool) -> Tensor:
    """Return the labels, ``classes`` for those out of range; raise for them if it may and values can be read."""
    is_outside = ((target < 0) | (target >= classes)) & ~ignored
    if may_raise and values_are_readable(target) and bool(is_outside.any()):
        accepted = f"have labels from 0 to {classes - 1}, or ignore_index, with hard_weight"
        check("target", False, accepted, f"has {int(target[is_outside][0])}", IndexError)
    return target.masked_fill(is_outside, classes)


def check_target(target: Any, input: Tensor, ignore_index: object) -> None:
    """Check the labels, which mark ignored rows."""
    is_index = isinstance(ignore_index, Integral) and not isinstance(ignore_index, bool)
    check("ignore_index", is_index, "be an int", f"is {ignore_index!r}", TypeError)
    if target is None:
        check("ignore_index", ignore_index == -100, "be -100, the default, without target", f"is {ignore_index}")
        return
    _check_tensor("target", target, input, is_floating=False)
    is_right = target.dtype in (torch.int64, torch.uint8)
    check("target", is_right, "have dtype torch.int64 or torch.uint8, as class indices have", f"has {target.dtype}")
    shape = list(input.shape[:-1])
    check("target", list(target.shape) == shape, f"have shape {shape}, the rows of input", f"has {list(target.shape)}")
