"""The cross entropy of a linear layer's outputs, without the outputs.

A call goes from the function here to ``implementations``, which chooses one: it weighs rows and reduces by ``losses``,
is differentiated by ``autograd``, and runs the kernels in :mod:`torch_aclnn_ops.ops.linear_cross_entropy`.
``_arguments`` says what the arguments must be, ``row_functions`` has the mathematics of some rows, and
``vocab_parallel`` the statistics of a vocabulary that is spread over processes.
"""

from collections.abc import Collection, Sequence
from typing import Any, overload

from torch_aclnn_ops._drop_ins import drop_in
from torch_aclnn_ops._torch_compat.public import LinearCrossEntropyOptions
from torch_aclnn_ops.functional._head.arguments import check_number
from torch_aclnn_ops.functional._head.shards import shards_of
from torch_aclnn_ops.functional.linear_cross_entropy import implementations
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.errors import call_torch_or_raise
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.options import (
    check_logit_options,
    check_outputs,
)
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.shift import places_of, to_labels, to_rows
from torch_aclnn_ops.functional.linear_cross_entropy._arguments.torch_function import (
    TorchArguments,
    are_plain,
    is_supported,
)
from torch_aclnn_ops.functional.linear_cross_entropy._distributed import local_arguments
from torch_aclnn_ops.functional.linear_cross_entropy._fsdp import call_in_forward
from torch_aclnn_ops.functional.linear_cross_entropy.autograd import StatisticsFunction
from torch_aclnn_ops.functional.linear_cross_entropy.losses import LinearCrossEntropyOutput, LossOptions
from torch_aclnn_ops.functional.linear_cross_entropy.vocab_parallel import messages_of

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
@drop_in  # type: ignore[misc]  # the options of the second overload are those of the first
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
        >>> import math, torch
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
    given = TorchArguments(input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing)
    if not are_plain(input, linear_weight, target, linear_bias, weight, token_weight):
        given, token_weight, process_group, vocab_sizes = local_arguments(
            given, token_weight, process_group, vocab_sizes, reduce_input_grad
        )
    shards = None
    if process_group is not None or vocab_sizes is not None:
        messages = messages_of(given, outputs)
        shards = shards_of("linear_cross_entropy", process_group, vocab_sizes, given.linear_weight, messages)
    logit_options = check_logit_options(softcap, temperature, chunk_size, max_memory, options)
    square_scale = check_number("linear_cross_entropy", "lse_square_scale", lse_square_scale)
    asked = check_outputs(outputs)
    places = 0 if shift is False else places_of(shift, given.target, given.linear_weight)
    if places:
        given, token_weight = to_rows(given, token_weight, places)
    classes = None if shards is None else shards.total
    if not is_supported(given, classes):
        return call_torch_or_raise(
            given,
            classes,
            options,
            softcap=softcap is not None,
            lse_square_scale=square_scale != 0,
            temperature=temperature != 1,
            shift=places != 0,
            token_weight=token_weight is not None,
            zero_if_all_ignored=zero_if_all_ignored,
            outputs=bool(asked),
        )
    ignored = -100 if ignore_index is None else ignore_index
    loss_options = LossOptions(reduction, ignored, float(label_smoothing), square_scale, zero_if_all_ignored, asked)
    call = implementations.prepare(given, token_weight, logit_options, loss_options, shards, reduce_input_grad)
    result = implementations.choose(call)(call)
    return to_labels(result, places) if places else result
