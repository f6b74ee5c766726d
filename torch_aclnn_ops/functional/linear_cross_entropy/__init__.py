"""Linear layer with cross entropy loss, without materializing the logits.

The function in this module calls ``implementations``, which chooses one implementation. It weights and reduces rows
with ``losses``, computes their ``statistics``, also of a vocabulary sharded over processes, and runs the kernels in
:mod:`torch_aclnn_ops.ops.linear_cross_entropy`. ``arguments`` says what the arguments must be.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from torch_aclnn_ops._checks import Reduction, check_bool, drop_in
from torch_aclnn_ops._switch import is_disabled
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional._head.arguments import labels_to_rows
from torch_aclnn_ops.functional._head.shards import check_not_local_shard, shards_of
from torch_aclnn_ops.functional.linear_cross_entropy.arguments import (
    any_subclass,
    check_arguments,
    check_own_options,
    checked_chunks,
    checked_shift,
    has_default_options,
    is_left_to_torch,
    leave_to_torch,
    own_options,
)
from torch_aclnn_ops.functional.linear_cross_entropy.few_logits import are_few, loss_in_cpp, loss_of_few_logits
from torch_aclnn_ops.functional.linear_cross_entropy.implementations import compute
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput, OutputName, shift_results
from torch_aclnn_ops.functional.linear_cross_entropy.sharded_head import (
    FSDP_HINT,
    call_in_fsdp_forward,
    local_arguments,
)
from torch_aclnn_ops.ops.linear_cross_entropy.call import Call

from torch import Tensor
from torch.nn import Module

__all__ = ["LinearCrossEntropyOutput", "linear_cross_entropy"]

_REMEDY = f"{FSDP_HINT}; if the ranks share the vocabulary, and all have the same input, pass process_group"


@drop_in
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: "LinearCrossEntropyOptions | None" = None,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    temperature: float = 1.0,
    shift: bool | int = False,
    token_weight: Tensor | None = None,
    zero_if_all_ignored: bool = False,
    outputs: tuple[OutputName, ...] | Collection[OutputName] = (),
    chunk_size: int | Literal["auto"] = "auto",
    max_memory: int | None = None,
    process_group: Any = None,
    vocab_sizes: Sequence[int] | None = None,
    reduce_input_grad: bool = True,
    fsdp_module: Module | None = None,
) -> Any:
    """Compute the cross entropy of ``linear(input, linear_weight, linear_bias)`` without materializing all logits.

    A drop-in replacement for :func:`torch.nn.functional.linear_cross_entropy`, with two differences: only the logits of
    one chunk of rows are materialized at a time, and float16 and bfloat16 inputs return a float32 loss, whose gradients
    are accumulated in float32. The page of the operator explains memory, shards and which implementation runs.

    Args:
        input: Hidden states, shape (H,), (N, H), (B, T, H) or with more dimensions, floating point.
        linear_weight: Weight of the head, shape (C, H); input's dtype. A K-dimensional loss, of a head of shape (C,
            d_1, ..., d_K, H), is left to torch's function.
        target: Class indices (int64 or uint8), shape () or (N,) or (B, T); or probabilities, floating point, shape (C,)
            or (N, C) or (B, T, C).
        linear_bias: Bias of the head, shape (C,).
        weight: Rescaling factor of each class, shape (C,), in input's dtype or float32; differentiable with
            probabilities only.
        reduction: ``"none"``, ``"mean"`` (divided by the weights of the targets that are not ignored) or ``"sum"``.
        ignore_index: Class index whose rows are ignored, -100 by default; only with class indices.
        label_smoothing: Weight of the uniform distribution in the target, from 0 to 1.
        options: PyTorch's options, with torch 2.13 and later; ``batch_chunk_size`` is used as ``chunk_size``.
        softcap: If given, logits z become ``softcap * tanh(z / softcap)``.
        lse_square_scale: Adds the z-loss ``lse_square_scale * logsumexp(z)^2`` to each row's loss. ``weight`` applies
            neither to it nor to its mean.
        temperature: Divides the logits, after the softcap.
        shift: Number of positions by which labels are shifted, ``True`` for 1: ``target[..., t]`` is the label of row
            ``t - shift``. The first labels of a sequence are ignored. All results are aligned with the labels.
        token_weight: Weight of each row's loss, shape of class indices, floating point, differentiable; ``"mean"``
            divides by their sum.
        zero_if_all_ignored: Return 0 for the mean if all rows are ignored, instead of NaN. The gradients are 0 anyway.
        outputs: Names of further results, fields of :class:`LinearCrossEntropyOutput`.
        chunk_size: Number of rows whose logits are materialized at a time; excludes CANN's fused operators.
        max_memory: Bytes that logits and float32 accumulators may take, which determines the chunk size.
        process_group: The :class:`torch.distributed.ProcessGroup` over which the vocabulary is sharded, in rank order.
            ``linear_weight`` and ``linear_bias`` are this rank's shards; the other arguments are the same on all ranks.
        vocab_sizes: Number of ``linear_weight``'s rows on each rank, which saves a collective.
        reduce_input_grad: With ``process_group``, sum the gradient of ``input`` over the ranks.
        fsdp_module: The model that owns the head, sharded by :func:`torch.distributed.fsdp.fully_shard`.

    Returns:
        The loss: a scalar, or for ``"none"`` a tensor with the shape of class indices; float32 for 16-bit inputs. With
        ``outputs``, a :class:`LinearCrossEntropyOutput`.

    Raises:
        IndexError: A class index is out of range (on the CPU in eager mode; otherwise the loss is NaN).
        RuntimeError: Shapes or dtypes do not match; ``label_smoothing`` is outside [0, 1].
        TypeError: An argument has the wrong type.
        ValueError: ``target`` or ``token_weight`` has another shape, an argument an invalid value, or ranks differ.

    Example:
        >>> import math, torch
        >>> input, head = torch.eye(2, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
        >>> loss = linear_cross_entropy(input, head, torch.tensor([1, 3]))
        >>> loss.backward()
        >>> round(loss.item(), 6) == round(math.log(4), 6), head.grad[1].tolist()
        (True, [-0.375, 0.125])

    Source: kernels aclnnFusedLinearOnlineMaxSum, aclnnFusedCrossEntropyLossWithMaxSum and
    aclnnFusedLinearCrossEntropyLossGrad; Hsu et al., "Liger Kernel" (2024); Wijmans et al., "Cut Your Losses" (2024).
    """
    if fsdp_module is not None:
        return call_in_fsdp_forward(linear_cross_entropy, locals())
    rows = None
    if not isinstance(chunk_size, str) or chunk_size != "auto" or max_memory is not None or options is not None:
        rows, max_memory = checked_chunks(chunk_size, max_memory, options)
    call = Call(
        input=input,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        target=target,
        weight=weight,
        token_weight=token_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        lse_square_scale=lse_square_scale,
        temperature=temperature,
        zero_if_all_ignored=zero_if_all_ignored,
        outputs=outputs,
        chunk_size=rows,
        max_memory=max_memory,
    )
    has_defaults = has_default_options(call)
    if has_defaults and rows is None and max_memory is None and shift is False and process_group is None:
        if vocab_sizes is None and reduce_input_grad is True:
            loss = loss_in_cpp(call)
            if loss is not None:
                return loss
    if any_subclass(call[:6]):
        call, process_group, vocab_sizes = local_arguments(call, process_group, vocab_sizes, reduce_input_grad)
    shards = None
    if process_group is not None or vocab_sizes is not None:
        shards = shards_of("linear_cross_entropy", process_group, vocab_sizes, call.linear_weight, call.input)
    check_bool("linear_cross_entropy", "reduce_input_grad", reduce_input_grad)
    if not has_defaults:
        call = check_own_options(call)
    places = 0 if shift is False else checked_shift(shift, call)
    if places:
        target, token_weight = labels_to_rows(call.target, call.token_weight, places, call.ignored_class())
        call = call._replace(target=target, token_weight=token_weight)
    is_torchs = is_left_to_torch(call)
    own = [] if not is_torchs and not is_disabled() else own_options(call) + ["process_group"] * (shards is not None)
    if is_torchs or (is_disabled() and not own):
        result: Tensor | LinearCrossEntropyOutput = leave_to_torch(call, options, own)
    else:
        check_arguments(call, None if shards is None else shards.total)
        if shards is None:
            check_not_local_shard("linear_cross_entropy", _REMEDY, linear_weight=call.linear_weight)
        is_small = shards is None and are_few(call)
        result = loss_of_few_logits(call) if is_small else compute(call, shards, reduce_input_grad)
    return shift_results(result, places) if places else result
