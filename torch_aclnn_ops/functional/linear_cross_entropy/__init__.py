"""The cross entropy of a linear layer's outputs, without the outputs.

A call goes from the function here to ``losses``, which weighs rows and reduces, to ``autograd``, which differentiates,
and to the kernels in :mod:`torch_aclnn_ops.ops.linear_cross_entropy`. ``_arguments`` says what the arguments must be,
``formula`` has the mathematics of some rows, and ``vocab_parallel`` the statistics of a vocabulary that is spread over
processes.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, overload

from torch_aclnn_ops._numerics import accumulation_dtype
from torch_aclnn_ops._torch_compat import LinearCrossEntropyOptions, is_any_autocast_enabled
from torch_aclnn_ops.functional._drop_in import check_no_tangent, lower_precision_autocast_dtype
from torch_aclnn_ops.functional.linear_cross_entropy import losses
from torch_aclnn_ops.functional.linear_cross_entropy._arguments import options as own_options
from torch_aclnn_ops.functional.linear_cross_entropy._arguments import torch_function
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.batches import check_batches
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.shift import check_shift, to_labels, to_rows
from torch_aclnn_ops.functional.linear_cross_entropy._distributed import check_not_local, local_arguments
from torch_aclnn_ops.functional.linear_cross_entropy._fsdp import call_in_forward, check_not_flat
from torch_aclnn_ops.functional.linear_cross_entropy.autograd import StatisticsFunction, statistics
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput, LossOptions
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import (
    raise_for_shards,
    shards_of,
    vocab_parallel_statistics,
)
from torch_aclnn_ops.ops.linear_cross_entropy.inputs import Inputs, RequestedOutputs
from torch_aclnn_ops.ops.linear_cross_entropy.statistics import Statistics

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["LinearCrossEntropyOutput", "StatisticsFunction", "linear_cross_entropy"]


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
    shift: bool | int = ...,
    token_weight: Tensor | None = ...,
    zero_if_all_ignored: bool = ...,
    outputs: tuple[()] = ...,
    chunk_size: int | str = ...,
    max_memory: int | None = ...,
    process_group: Any = ...,
    vocab_sizes: Sequence[int] | None = ...,
    reduce_input_grad: bool = ...,
    fsdp_module: Module | None = ...,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, outputs: Collection[str], **options: Any
) -> LinearCrossEntropyOutput: ...
def linear_cross_entropy(  # type: ignore[misc]  # the options of the second overload are those of the first
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
    shift: bool | int = False,
    token_weight: Tensor | None = None,
    zero_if_all_ignored: bool = False,
    outputs: Collection[str] = (),
    chunk_size: int | str = "auto",
    max_memory: int | None = None,
    process_group: Any = None,
    vocab_sizes: Sequence[int] | None = None,
    reduce_input_grad: bool = True,
    fsdp_module: Module | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """Compute the cross entropy of ``linear(input, linear_weight, linear_bias)`` without holding these logits.

    A drop-in for :func:`torch.nn.functional.linear_cross_entropy`, with two differences: memory is always that of the
    logits of a few rows (also with label smoothing, probabilities as targets, and in every derivative), and float16 and
    bfloat16 inputs give a float32 loss, whose gradients are summed in float32.

    The rows are cut in chunks. Where the loss is a scalar and a gradient is needed, the forward pass makes the
    gradients of input, head and bias that are needed together with the loss (three matrix products); the backward pass
    multiplies them by the loss's own. With ``"none"``, and for whatever is differentiated twice, the logits are
    computed again in the backward pass. On a CPU, ignored rows are left out of all products.

    Args:
        input: rows, shape (H,), (N, H) or (B, T, H), floating point.
        linear_weight: the head, shape (C, H), or (C, d_1, ..., d_K, H) for a K-dimensional loss; input's dtype.
        target: class indices (int64 or uint8), shape () or (N,) or (B, T) or (N, d_1, ..., d_K); or probabilities of
            input's kind of dtype, shape (C,) or (N, C) or (B, T, C) or (N, C, d_1, ..., d_K).
        linear_bias: added to the logits, ``linear_weight``'s shape without H.
        weight: factor of each class, shape (C,), in input's dtype or float32; differentiable with probabilities only.
        reduction: ``"none"``, ``"mean"`` (divided by the weights of the targets that are not
            ignored) or ``"sum"``.
        ignore_index: class index whose rows are ignored, -100 by default; only with class indices.
        label_smoothing: share of the uniform distribution in the target, from 0 to 1.
        options: torch's options, with torch 2.13 and later. ``batch_chunk_size`` is used as ``chunk_size``; the others
            promise what always holds here (accumulation in float32, a backward that can be repeated).
        softcap: if given, logits z become ``softcap * tanh(z / softcap)``; beyond the largest number of their dtype, it
            leaves them as they are.
        lse_square_scale: adds the z-loss ``lse_square_scale * logsumexp(z)^2`` to each row's loss; class weights do not
            apply to it, and ``"mean"`` divides it by the number of rows that are not ignored.
        temperature: divides the logits, after the softcap.
        shift: how many places a label stands behind the row that predicts it, ``True`` for 1: ``target[..., t]`` is
            that of row ``t - shift``, as in a causal language model, whose input needs no copy then. The first labels
            of a sequence have no row, and count as ignored. ``token_weight`` goes with the labels, and so do all
            results that have the shape of class indices.
        token_weight: factor of each row's loss, shape of class indices, floating point, differentiable. ``"mean"``
            divides by the sum of these factors, as it does by those of the classes.
        zero_if_all_ignored: the mean is 0 if all rows are ignored; by default it is nan, as torch's. Its gradients are
            0 anyway.
        outputs: names of other results, fields of :class:`LinearCrossEntropyOutput`; log-probabilities, entropy,
            log-sum-exp and z-loss have derivatives.
        chunk_size: rows whose logits are held at a time. ``"auto"`` lets the kernels choose; only then, and without
            ``max_memory``, the fused operators are used.
        max_memory: bytes that may be held beyond arguments and results (logits, and float32 sums of 16-bit gradients;
            rows of the input's size are not counted); chooses the chunk size. ``torch_aclnn_ops.explain`` shows what
            came out. Too little is refused before any work, for the backward pass too.
        process_group: processes that share the vocabulary, a :class:`torch.distributed.ProcessGroup`. Then
            ``linear_weight`` and ``linear_bias`` are this rank's rows, those after the lower ranks' rows, of which
            there may be any number on a rank, also none; the other arguments are those of the whole vocabulary and the
            same on every rank, and so are the results. All ranks must make the call, and differentiate the same loss.
            A call has one collective, and its backward pass another one. The ranks compare their calls in it: where
            head, input, targets or options do not fit each other, every rank raises the same ValueError; where that
            would wait for a device, in transforms and in compiled code, all results are nan.
        vocab_sizes: number of ``linear_weight``'s rows on each rank; without it every call asks for them in one more
            collective, whose result the CPU waits for, and which also compares the numbers of input's rows: with
            ``vocab_sizes``, different numbers of rows are an error of the collective's own.
        reduce_input_grad: with ``process_group``, sum the gradient of ``input`` over the ranks, in float32. ``False``
            leaves it this rank's part, for instance for a reduce-scatter.
        fsdp_module: the model with ``linear_weight`` and ``linear_bias``, parameters that
            :func:`torch.distributed.fsdp.fully_shard` has sharded. The call is made as a forward pass of the sharded
            module: the weights are whole in it and have the ``param_dtype`` of its policy, as the input has, and
            gradients are reduced and averaged as those of other parameters. All ranks must make the call, with rows of
            their own. Where the weights are whole anyway (in the forward pass of the module, or in a model that is not
            sharded) it changes nothing.

    Returns:
        The loss: 0-dim, or with ``"none"`` of the shape of class indices; float32 for 16-bit inputs. With ``outputs``,
        a :class:`LinearCrossEntropyOutput`. On other devices than the CPU, where a check would wait for the device, a
        class index outside the classes gives a loss of nan.

    Raises:
        IndexError: a class index is outside the classes (on a CPU, in eager mode; elsewhere its loss is nan).
        RuntimeError: shapes or dtypes do not fit each other; ``label_smoothing`` is outside [0, 1].
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a value that is not among those above, or not the same on every rank.

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
    if fsdp_module is not None:
        return call_in_forward(linear_cross_entropy, locals())
    if not torch_function.are_plain(input, linear_weight, target, linear_bias, weight, token_weight):
        args = input, linear_weight, target, linear_bias, weight, token_weight, process_group, vocab_sizes
        input, linear_weight, target, linear_bias, weight, token_weight, process_group, vocab_sizes = local_arguments(
            args, reduce_input_grad
        )
    shards = None
    if process_group is not None or vocab_sizes is not None:
        rows = math.prod(input.shape[:-1]) if isinstance(input, Tensor) else -1
        shards = shards_of(
            process_group, linear_weight, vocab_sizes, rows, _numbers_of_a_row(input, label_smoothing, outputs)
        )
    logit_options = own_options.logit_options(softcap, temperature, chunk_size, max_memory, options)
    square_scale = own_options.checked_number("lse_square_scale", lse_square_scale)
    asked = own_options.check_outputs(outputs)
    places = 0 if shift is False else check_shift(shift, target, linear_weight)
    ignored = -100 if ignore_index is None else ignore_index
    if places:
        target, token_weight = to_rows(target, token_weight, places, ignored)
    given = torch_function.TorchArguments(
        input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing
    )
    whole = None if shards is None else shards.total
    if not torch_function.is_supported(given, whole):
        torch_function.check_types(given)
        check_not_flat(linear_weight)
        check_batches(given, whole)
        torch_function.check_class_weight(given)
        if whole is not None:
            raise_for_shards(given, whole)
        loss = torch_function.left_to_torch(given, options)
        own_options.check_only_torchs_options(
            softcap=softcap is not None,
            lse_square_scale=square_scale != 0,
            temperature=temperature != 1,
            shift=places != 0,
            token_weight=token_weight is not None,
            zero_if_all_ignored=zero_if_all_ignored,
            outputs=bool(asked),
        )
        return loss
    # Dynamo does not trace a grad_fn.
    if shards is None and not torch.compiler.is_compiling() and linear_weight.grad_fn is not None:
        check_not_local(linear_weight)
    shape = (*input.shape[:-1], *linear_weight.shape[1:-1])
    if target.is_floating_point():
        own_options.check_outputs_of_probabilities(asked)
    elif weight is not None:
        check_no_tangent("linear_cross_entropy", weight)
    loss_options = LossOptions(reduction, ignored, float(label_smoothing), square_scale, zero_if_all_ignored, asked)
    if token_weight is not None:
        own_options.check_token_weight(token_weight, shape, input)
        token_weight = torch_function.widen_to(input, token_weight).reshape(-1)
    if is_any_autocast_enabled():
        dtype = lower_precision_autocast_dtype(input)
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    gradients = (False, False, False)
    if torch.is_grad_enabled():
        bias_grad = linear_bias is not None and linear_bias.requires_grad
        gradients = (input.requires_grad, linear_weight.requires_grad, bias_grad)
    is_smoothed = True if label_smoothing > 0 else False  # a branch makes it a constant of compiled code
    if softcap is not None:
        logit_options = logit_options.without_needless_softcap(accumulation_dtype(input.dtype))
    requested = RequestedOutputs(is_smoothed, "entropy" in asked, loss_options.needs_tokens, gradients)
    inputs = Inputs(
        input if input.dim() == 2 else input.reshape(math.prod(input.shape[:-1]), input.shape[-1]),
        linear_weight,
        linear_bias,
        target if target.dim() == 1 and target.dtype == torch.int64 else _rows_of_target(target, linear_weight),
        None if weight is None else torch_function.widen_to(input, weight),
        logit_options,
        requested,
    )
    if max_memory is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if any(tensor is not None and tensor.requires_grad for tensor in inputs[:5]):
            inputs.tile_rows()  # too little memory for the backward pass is refused now
    reduce: Callable[[Inputs], Statistics] = statistics
    if shards is not None:
        reduce = partial(
            vocab_parallel_statistics, shards=shards, reduce_input_grad=reduce_input_grad, loss_options=loss_options
        )
    result = losses.result(inputs, token_weight, whole or linear_weight.shape[0], loss_options, shape, reduce)
    return to_labels(result, places) if places else result


def _numbers_of_a_row(input: object, label_smoothing: object, outputs: object) -> int:
    """Return a number that differs where the sizes of what ranks exchange of a row do."""
    is_double = isinstance(input, Tensor) and input.dtype == torch.float64
    is_smoothed = isinstance(label_smoothing, (int, float)) and label_smoothing > 0
    names = set(outputs) if isinstance(outputs, Collection) else set()
    has_tokens = not names.isdisjoint(("token_accuracy", "predicted_tokens"))
    return is_double + 2 * is_smoothed + 4 * ("entropy" in names) + 8 * has_tokens


def _rows_of_target(target: Tensor, linear_weight: Tensor) -> Tensor:
    """Return the targets of all rows, the positions of a row one after the other."""
    if not target.is_floating_point():
        return target.reshape(-1).long()
    if linear_weight.dim() > 2:
        target = target.movedim(1, -1)
    return target.reshape(math.prod(target.shape[:-1]), target.shape[-1])
