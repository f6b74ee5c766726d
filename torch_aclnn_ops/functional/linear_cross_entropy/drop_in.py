"""The public function: torch's arguments and errors on the outside, rows and their statistics on the inside."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, overload

from torch_aclnn_ops._torch_compat import LinearCrossEntropyOptions
from torch_aclnn_ops.functional._drop_in import lower_precision_autocast_dtype, refuse_tangent
from torch_aclnn_ops.functional.linear_cross_entropy import _arguments as arguments
from torch_aclnn_ops.functional.linear_cross_entropy._dtensors import Arguments as DTensorArguments
from torch_aclnn_ops.functional.linear_cross_entropy._dtensors import local_arguments
from torch_aclnn_ops.functional.linear_cross_entropy._left_to_torch import left_to_torch
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput, LossOptions, rows_of
from torch_aclnn_ops.functional.linear_cross_entropy.results import result_of
from torch_aclnn_ops.functional.linear_cross_entropy.statistics import statistics
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import vocab_parallel_statistics
from torch_aclnn_ops.ops._numerics import accumulation_dtype
from torch_aclnn_ops.ops.linear_cross_entropy._problem import Problem, Statistics

from torch import Tensor


@overload
def linear_cross_entropy(  # type: ignore[overload-overlap]  # the first that fits is taken
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int | None = ...,
    label_smoothing: float = ...,
    options: "LinearCrossEntropyOptions | None" = ...,
    softcap: float | None = ...,
    lse_square_scale: float = ...,
    temperature: float = ...,
    token_weight: Tensor | None = ...,
    zero_if_all_ignored: bool = ...,
    outputs: tuple[()] = ...,
    chunk_size: int | str = ...,
    max_memory: int | None = ...,
    process_group: Any = ...,
    vocab_sizes: Sequence[int] | None = ...,
    reduce_input_grad: bool = ...,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    reduction: str = ...,
    ignore_index: int | None = ...,
    label_smoothing: float = ...,
    options: "LinearCrossEntropyOptions | None" = ...,
    softcap: float | None = ...,
    lse_square_scale: float = ...,
    temperature: float = ...,
    token_weight: Tensor | None = ...,
    zero_if_all_ignored: bool = ...,
    outputs: Collection[str],
    chunk_size: int | str = ...,
    max_memory: int | None = ...,
    process_group: Any = ...,
    vocab_sizes: Sequence[int] | None = ...,
    reduce_input_grad: bool = ...,
) -> LinearCrossEntropyOutput: ...
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: "LinearCrossEntropyOptions | None" = None,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    temperature: float = 1.0,
    token_weight: Tensor | None = None,
    zero_if_all_ignored: bool = False,
    outputs: Collection[str] = (),
    chunk_size: int | str = "auto",
    max_memory: int | None = None,
    process_group: Any = None,
    vocab_sizes: Sequence[int] | None = None,
    reduce_input_grad: bool = True,
) -> Tensor | LinearCrossEntropyOutput:
    """Compute the cross entropy of ``linear(input, linear_weight, linear_bias)`` without holding these logits.

    A drop-in for :func:`torch.nn.functional.linear_cross_entropy`, with two differences: memory is always that of the
    logits of a few rows (also with label smoothing, probabilities as targets, and in every derivative), and float16 and
    bfloat16 inputs give a float32 loss, whose gradients are summed in float32.

    The rows are cut in chunks. Where the loss is one number and a gradient is needed, the forward pass makes the
    gradients of input, head and bias that are needed together with the loss (three matrix products); the backward pass
    multiplies them by the loss's own. With ``"none"``, and for whatever is differentiated twice, the logits are
    computed again in the backward pass. On a CPU, rows that do not count are left out of all products.

    Args:
        input: rows, shape (H,), (N, H) or (B, T, H), floating point.
        linear_weight: the head, shape (C, H), or (C, d_1, ..., d_K, H) for a K-dimensional loss; input's dtype.
        target: class indices (int64 or uint8), shape () or (N,) or (B, T) or (N, d_1, ..., d_K); or probabilities of
            input's kind of dtype, shape (C,) or (N, C) or (B, T, C) or (N, C, d_1, ..., d_K).
        linear_bias: added to the logits, ``linear_weight``'s shape without H.
        weight: factor of each class, shape (C,); differentiable with probabilities only.
        reduction: ``"none"``, ``"mean"`` (divided by the weights of the targets that count) or ``"sum"``.
        ignore_index: class index whose rows do not count, -100 by default; only with class indices.
        label_smoothing: share of the uniform distribution in the target, from 0 to 1.
        options: torch's options, with torch 2.13 and later. ``batch_chunk_size`` is used as ``chunk_size``; the others
            promise what always holds here (accumulation in float32, a backward that can be repeated).
        softcap: if given, logits z become ``softcap * tanh(z / softcap)``.
        lse_square_scale: adds the z-loss ``lse_square_scale * logsumexp(z)^2`` to each row's loss; class weights do not
            apply to it, and ``"mean"`` divides it by the number of rows that count.
        temperature: divides the logits, after the softcap.
        token_weight: factor of each row's loss, shape of class indices, floating point, differentiable. ``"mean"``
            divides by the sum of these factors, as it does by those of the classes.
        zero_if_all_ignored: the mean over no rows is 0; by default it is nan, as torch's. Its gradients are 0 anyway.
        outputs: names of other results, fields of :class:`LinearCrossEntropyOutput`; log-probabilities, entropy and
            z-loss have derivatives.
        chunk_size: rows whose logits are held at a time. ``"auto"`` lets the kernels choose; only then, and without
            ``max_memory``, the fused operators are used.
        max_memory: bytes that may be held beyond arguments and results (logits, and float32 sums of 16-bit gradients;
            rows of the input's size are not counted); chooses the chunk size. ``torch_aclnn_ops.explain`` shows what
            came out.
        process_group: processes that share the vocabulary, a :class:`torch.distributed.ProcessGroup`. Then
            ``linear_weight`` and ``linear_bias`` are this rank's rows, those after the lower ranks' rows, of which
            there may be any number on a rank, also none; the other arguments are those of the whole vocabulary and the
            same on every rank, and so are the results. All ranks must make the call, and differentiate the same loss.
            A call has one collective, and its backward pass another one.
        vocab_sizes: number of ``linear_weight``'s rows on each rank; without it every call asks for them in one more
            collective, whose result the CPU waits for.
        reduce_input_grad: with ``process_group``, sum the gradient of ``input`` over the ranks, in float32. ``False``
            leaves it this rank's part, for instance for a reduce-scatter.

    Returns:
        The loss: 0-dim, or with ``"none"`` of the shape of class indices; float32 for 16-bit inputs. With ``outputs``,
        a :class:`LinearCrossEntropyOutput`. On other devices than the CPU, where a check would wait for the device, a
        class index outside the classes gives a loss of nan.

    Raises:
        IndexError: a class index is outside the classes (on a CPU, in eager mode; elsewhere its loss is nan).
        RuntimeError: shapes or dtypes do not fit each other; ``label_smoothing`` is outside [0, 1].
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a value that is not among those above.

    Example:
        >>> import torch
        >>> input, head = torch.eye(2, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
        >>> loss = linear_cross_entropy(input, head, torch.tensor([1, 3]))
        >>> loss.backward()
        >>> round(loss.item(), 6) == round(math.log(4), 6), head.grad[1].tolist()
        (True, [-0.375, 0.125])
        >>> result = linear_cross_entropy(input, head, torch.tensor([1, 3]), outputs=("entropy", "token_accuracy"))
        >>> result.entropy.shape, result.token_accuracy.item()
        (torch.Size([2]), 0.0)

    Source: kernels aclnnFusedLinearOnlineMaxSum, aclnnFusedCrossEntropyLossWithMaxSum and
    aclnnFusedLinearCrossEntropyLossGrad. Gradients in the forward pass: Hsu et al., "Liger Kernel" (2024); chunks:
    Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024).
    """
    input, linear_weight, target, linear_bias, weight, token_weight, process_group, vocab_sizes = local_arguments(
        DTensorArguments(input, linear_weight, target, linear_bias, weight, token_weight, process_group, vocab_sizes),
        reduce_input_grad,
    )
    shards = arguments.shards_of(process_group, linear_weight, vocab_sizes)
    logit_options = arguments.logit_options(softcap, temperature, chunk_size, max_memory, options)
    square_scale, asked = arguments.check_square_scale(lse_square_scale), arguments.check_outputs(outputs)
    of_torch: dict[str, Any] = {
        "linear_bias": linear_bias,
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    whole = None if shards is None else shards.total
    if not arguments.is_ours(input, linear_weight, target, **of_torch, classes=whole):
        if shards is not None:
            arguments.refuse_in_shards(input, linear_weight, target, **of_torch, classes=shards.total)
        loss = left_to_torch(input, linear_weight, target, **of_torch)
        arguments.refuse_more_than_torchs(softcap, square_scale, temperature, token_weight, zero_if_all_ignored, asked)
        return loss
    if not target.is_floating_point():
        refuse_tangent("linear_cross_entropy", weight)
    shape = _shape_of_indices(input, linear_weight)
    arguments.check_outputs_of_probabilities(target, asked)
    arguments.check_token_weight(token_weight, shape, input)
    loss_options = LossOptions(
        reduction,
        -100 if ignore_index is None else ignore_index,
        float(label_smoothing),
        square_scale,
        zero_if_all_ignored,
        asked,
    )
    dtype = lower_precision_autocast_dtype(input)
    input, linear_weight = input.to(dtype), linear_weight.to(dtype)
    linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    wide = accumulation_dtype(dtype)
    rows = rows_of(
        input,
        _rows_of_target(target, linear_weight),
        None if weight is None else weight.to(wide),
        None if token_weight is None else token_weight.to(wide).reshape(-1),
        linear_weight.shape[0] if shards is None else shards.total,
        loss_options,
    )
    problem = Problem(
        input.reshape(math.prod(input.shape[:-1]), input.shape[-1]),
        linear_weight,
        linear_bias,
        rows.target,
        rows.class_weight,
        logit_options,
        "entropy" in asked,
    )
    reduce: Callable[..., Statistics] = statistics
    if shards is not None:
        reduce = partial(vocab_parallel_statistics, shards=shards, reduce_input_grad=reduce_input_grad)
    return result_of(problem, rows, loss_options, shape, reduce)


def _shape_of_indices(input: Tensor, linear_weight: Tensor) -> tuple[int, ...]:
    return (*input.shape[:-1], *linear_weight.shape[1:-1])


def _rows_of_target(target: Tensor, linear_weight: Tensor) -> Tensor:
    """Return the targets of all rows, the positions of a row one after the other."""
    if not target.is_floating_point():
        return target.reshape(-1).long()
    positions = linear_weight.dim() - 2
    if positions > 0:
        target = target.movedim(1, -1)
    return target.reshape(math.prod(target.shape[:-1]), target.shape[-1])
