"""Row statistics of a vocabulary that is sharded over the ranks of a process group.

Each rank reduces the logits of its own classes. One collective gathers the statistics of all ranks, from which every
rank computes those of the full vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Integral
from typing import Any

from torch_aclnn_ops import _extension
from torch_aclnn_ops._autograd.derivatives import any_differentiated, in_functorch_transform
from torch_aclnn_ops._numerics import accumulation_dtype, widen
from torch_aclnn_ops.functional.linear_cross_entropy._agreement import (
    REDUCTIONS,
    SIZE,
    Call,
    check_messages,
    compare_summaries,
    hash_sizes,
    summarize,
)
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.torch_function import TorchArguments
from torch_aclnn_ops.functional.linear_cross_entropy._distributed import (
    Members,
    copy_to_group,
    gather,
    gather_constant,
    raise_if_compiled_transform,
)
from torch_aclnn_ops.functional.linear_cross_entropy.autograd import statistics
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LossOptions, distribution_sums
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs
from torch_aclnn_ops.ops.linear_cross_entropy.kernels import Kernels, choose_kernels
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import ELSEWHERE, IGNORED, Statistics, combine

import torch
from torch import Tensor
from torch.nn.functional import pad

_LARGEST_SHARD_IN_FLOAT32 = 2**24  # float32 represents all integers up to it


@dataclass(frozen=True)
class VocabularyShards:
    """A sharded vocabulary: rank r has the ``sizes[r]`` classes that follow those of the lower ranks."""

    members: Members
    sizes: tuple[int, ...]
    excess: int = 0  # rows of this rank's head minus its size

    @property
    def total(self) -> int:
        """The number of classes of the full vocabulary."""
        return sum(self.sizes)

    def slices(self) -> list[slice]:
        """Return the range of classes of every rank."""
        return [slice(stop - size, stop) for stop, size in zip(accumulate(self.sizes), self.sizes, strict=True)]


def _gather_sizes(members: Members, message: Sequence[int]) -> tuple[int, ...]:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "linear_cross_entropy: vocab_sizes must be given under torch.compile, because without it the number of"
            " classes of every rank is read from a collective; but it is None"
        )
    device = "cpu" if "cpu" in members.devices else members.devices[0]
    gathered = gather_constant(torch.tensor(message, device=device), members)
    if device == "npu":
        _extension.check_queue("linear_cross_entropy")  # otherwise uninitialized values could be read
    found = gathered.tolist()
    check_messages(found)
    return tuple(sizes for sizes, *_ in found)


def _checked_sizes(vocab_sizes: Any, size: int) -> tuple[int, ...]:
    accepted = f"a sequence of {size} integers, the rows of linear_weight on each rank of process_group"
    if not isinstance(vocab_sizes, Sequence) or any(
        isinstance(entry, bool) or not isinstance(entry, Integral) for entry in vocab_sizes
    ):
        raise TypeError(f"linear_cross_entropy: vocab_sizes must be None or {accepted}, but it is {vocab_sizes!r}")
    if len(vocab_sizes) != size or any(entry < 0 for entry in vocab_sizes):
        raise ValueError(f"linear_cross_entropy: vocab_sizes must be {accepted}, but it is {vocab_sizes!r}")
    return tuple(int(entry) for entry in vocab_sizes)


def shards_of(
    process_group: Any, vocab_sizes: Sequence[int] | None, given: TorchArguments, outputs: object
) -> VocabularyShards:
    """Determine the shards of the vocabulary, and check ``process_group`` and ``vocab_sizes``.

    Without ``vocab_sizes`` the ranks exchange their numbers of classes in a synchronizing collective, which also
    compares the number of rows and the message size per row; this raises in compiled code.
    """
    linear_weight = given.linear_weight
    if process_group is None:
        raise ValueError(
            f"linear_cross_entropy: vocab_sizes must be None if process_group is None, but it is {vocab_sizes!r}"
        )
    if not isinstance(linear_weight, Tensor) or linear_weight.dim() < 2:
        raise TypeError(
            "linear_cross_entropy: linear_weight must be a Tensor of shape (rows of this rank, H) if process_group"
            f" is given, but it is {linear_weight!r}"
        )
    members, local_rows = Members.of(process_group), linear_weight.shape[0]
    if vocab_sizes is None:
        rows = math.prod(given.input.shape[:-1]) if isinstance(given.input, Tensor) else -1
        sizes = _gather_sizes(members, (local_rows, rows, _numbers_of_a_row(given, outputs)))
    else:
        sizes = _checked_sizes(vocab_sizes, members.size)
    if sum(sizes) == 0:
        raise ValueError("linear_cross_entropy: linear_weight must have a row on some rank, but it has none on any")
    return VocabularyShards(members, sizes, local_rows - sizes[members.rank])


def _numbers_of_a_row(given: TorchArguments, outputs: object) -> int:
    """Return a number that identifies which values, of which dtype, a rank sends per row."""
    input, label_smoothing = given.input, given.label_smoothing
    is_double = isinstance(input, Tensor) and input.dtype == torch.float64
    is_smoothed = isinstance(label_smoothing, (int, float)) and label_smoothing > 0
    names = set(outputs) if isinstance(outputs, Collection) else set()
    has_tokens = not names.isdisjoint(("token_accuracy", "predicted_tokens"))
    return is_double + 2 * is_smoothed + 4 * ("entropy" in names) + 8 * has_tokens


def vocab_parallel_statistics(
    inputs: Inputs, shards: VocabularyShards, reduce_input_grad: bool = True, loss_options: LossOptions | None = None
) -> Statistics:
    """Reduce the logits of every row of a head that is sharded over ranks.

    Every rank must call it with the same input, target and class weights, and differentiate the same function of the
    results, which are the same on all ranks. The gradients of input, target and class weights are replicated; those of
    weight and bias are sharded.

    Weight and bias of ``inputs`` are this rank's shard, which may be empty; target, class weights and results refer to
    the full vocabulary. ``reduce_input_grad`` sums the gradient of the input over the ranks, in one more collective;
    otherwise it is this rank's partial sum.

    The ranks compare their arguments in the same collective, and raise if they do not match; if values cannot be read,
    as on an NPU, all results are nan.
    """
    raise_if_compiled_transform()
    summary = _summarize(inputs, shards, reduce_input_grad, loss_options)
    local, kernels, target_probability_sum = _local_inputs(inputs, shards, reduce_input_grad)
    found, target_probability_sums, factor = _gather_statistics(
        statistics(local, kernels), target_probability_sum, summary, shards
    )
    filled = [classes for classes, size in zip(shards.slices(), shards.sizes, strict=True) if size > 0]
    results = combine(found, target_probability_sums, filled, inputs.class_weight)
    if not inputs.target.is_floating_point():
        results = results.without(inputs.target == IGNORED)
    if factor is None:
        return results
    *values, tokens = results
    return Statistics._make((*(None if rows is None else rows * factor for rows in values), tokens))


def _summarize(
    inputs: Inputs, shards: VocabularyShards, reduce_input_grad: bool, loss_options: LossOptions | None
) -> Tensor:
    options, input = inputs.options, inputs.input
    is_differentiated = reduce_input_grad and (in_functorch_transform() or any_differentiated([input]))
    reduction, smoothing, square_scale = "none", 0.0, 0.0
    if loss_options is not None:
        reduction, smoothing = loss_options.reduction, loss_options.label_smoothing
        square_scale = loss_options.lse_square_scale
    call = Call(
        input.shape[0],
        input.shape[1],
        hash_sizes(shards.sizes),
        REDUCTIONS.index(reduction),
        smoothing,
        square_scale,
        options.softcap or 0.0,
        options.temperature,
        inputs.target.is_floating_point(),
        is_differentiated,
        shards.excess,
    )
    return summarize(call, input, inputs.target, _message_dtype(inputs, shards))


def _message_dtype(inputs: Inputs, shards: VocabularyShards) -> torch.dtype:
    if inputs.requested.predicted_tokens and max(shards.sizes) > _LARGEST_SHARD_IN_FLOAT32:
        return torch.float64
    return accumulation_dtype(inputs.input.dtype)


def _local_inputs(inputs: Inputs, shards: VocabularyShards, reduce_input_grad: bool) -> tuple[Inputs, Kernels, Tensor]:
    """Return the inputs for this rank's classes, their kernels, and the target probability in them for each row."""
    members, classes = shards.members, shards.slices()[shards.members.rank]
    weight, bias, target = inputs.linear_weight, inputs.linear_bias, inputs.target
    if shards.excess:  # an error or nan follows, but this rank must still take part in the collectives
        weight = pad(weight, (0, 0, 0, -shards.excess))
        bias = None if bias is None else pad(bias, (0, -shards.excess))
    class_weight = inputs.class_weight
    class_weight = None if class_weight is None else copy_to_group(class_weight, members)[classes]
    if target.is_floating_point():
        target = copy_to_group(target, members)[:, classes]
        target_probability_sum = distribution_sums(target, class_weight, accumulation_dtype(inputs.input.dtype))
    else:
        is_here = (target >= classes.start) & (target < classes.stop)
        elsewhere = torch.where(target == IGNORED, IGNORED, ELSEWHERE)
        target = torch.where(is_here, target - classes.start, elsewhere)
        target_probability_sum = is_here
    if classes.start == classes.stop:
        # An unused class, so that all ranks have the same graph, and the same order of collectives.
        weight = pad(weight, (0, 0, 0, 1))
        bias = None if bias is None else pad(bias, (0, 1))
        class_weight = None if class_weight is None else pad(class_weight, (0, 1))
        target = pad(target, (0, 1)) if target.is_floating_point() else target
    options = replace(inputs.options, is_shard=True)
    local = Inputs(inputs.input, weight, bias, target, class_weight, options, inputs.requested)
    kernels = choose_kernels(local)
    if reduce_input_grad and (in_functorch_transform() or any_differentiated([inputs.input])):
        # Partial 16-bit gradients are summed in float32 and rounded once. The fused operators round each part.
        is_fused = kernels.why_not_fused is None
        if torch.compiler.is_compiling():  # the choice of the compiled operator is not known yet
            is_fused = inputs.input.device.type == "npu"
        input = inputs.input if is_fused else widen(inputs.input)
        local = local._replace(input=copy_to_group(input, members))
    return local, kernels, target_probability_sum


def _gather_statistics(
    reduced: Statistics, target_probability_sum: Tensor, summary: Tensor, shards: VocabularyShards
) -> tuple[Statistics, Tensor, Tensor | None]:
    """Gather statistics and target probability sums of all nonempty shards, shape (shards, N) each, in one collective.

    The third result is the factor of :func:`compare_summaries`.
    """
    rows = (*reduced, target_probability_sum)
    given = [row.to(summary.dtype) for row in rows if row is not None]
    message = gather(torch.cat([summary, *given]), shards.members)
    factor = compare_summaries(message[:, :SIZE].detach(), shards.sizes)
    gathered = message[:, SIZE:].unflatten(1, (len(given), target_probability_sum.shape[0]))
    if not all(shards.sizes):
        gathered = gathered[[rank for rank, size in enumerate(shards.sizes) if size > 0]]
    remaining = iter(gathered.unbind(1))
    *found, target_probability_sums = (None if row is None else next(remaining).to(row.dtype) for row in rows)
    assert target_probability_sums is not None
    return Statistics._make(found), target_probability_sums, factor
