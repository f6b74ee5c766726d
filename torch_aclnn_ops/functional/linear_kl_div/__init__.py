"""The divergence of two linear layers' outputs, a student's and its teacher's, without materializing them.

A call goes from the function here to ``implementations``, which gives the engine of losses on a head what it needs, and
reduces the losses of rows. ``chunks`` is the kernel, and ``formula`` has the mathematics and every derivative.
``call`` says what the arguments must be.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, get_args

from torch_aclnn_ops._checks import (
    NON_NEGATIVE,
    Divergence,
    Reduction,
    check_beta,
    check_bool,
    check_choice,
    check_memory,
    check_number,
    check_shift,
)
from torch_aclnn_ops._torch_compat.private import disable_compilation
from torch_aclnn_ops.functional._head.arguments import check_token_weight, labels_to_rows, rows_to_labels
from torch_aclnn_ops.functional._head.shards import check_not_local_shard, shards_of
from torch_aclnn_ops.functional.linear_kl_div.call import (
    NAME,
    REMEDY,
    Call,
    check,
    check_layer,
    check_target,
    first_classes,
    with_teacher,
)
from torch_aclnn_ops.functional.linear_kl_div.implementations import compute, prepare

from torch import Tensor

__all__ = ["linear_kl_div"]

_Arguments = ParamSpec("_Arguments")


def _eager_with_process_group(function: Callable[_Arguments, Tensor]) -> Callable[_Arguments, Tensor]:
    """Break the graph of compiled code at calls with ``process_group``, whose collectives it cannot contain."""
    eager = disable_compilation(function)

    @functools.wraps(function)
    def called(*args: _Arguments.args, **options: _Arguments.kwargs) -> Tensor:
        return function(*args, **options) if options.get("process_group") is None else eager(*args, **options)

    return called


@_eager_with_process_group
def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    teacher_probs: Tensor | None = None,
    teacher_top_k: tuple[Tensor, Tensor] | None = None,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    target: Tensor | None = None,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    shift: bool | int = False,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    zero_if_all_ignored: bool = False,
    chunk_size: int | Literal["auto"] = "auto",
    max_memory: int | None = None,
    process_group: Any = None,
    vocab_sizes: Sequence[int] | None = None,
    reduce_input_grad: bool = True,
) -> Tensor:
    """Compute a divergence between the outputs of a student's and a teacher's head, without materializing all logits.

    The student's distribution is ``softmax(linear(input, linear_weight, linear_bias) / temperature)``. The teacher's is
    computed in the same way from a head of its own, or given as probabilities, to which ``temperature`` does not apply.

    Args:
        input: The student's rows, shape (H,), (N, H), (B, T, H) or with more dimensions, floating point.
        linear_weight: The student's head, shape (V, H), the dtype of ``input``.
        teacher_input: The teacher's rows, shape (..., H_t) with the rows of ``input``, floating point.
        teacher_weight: The teacher's head, shape (V, H_t), the dtype of ``teacher_input``.
        linear_bias: Added to the student's logits, shape (V,).
        teacher_bias: Added to the teacher's logits, shape (V,).
        teacher_log_probs: Log-probabilities of all classes instead of the teacher's head, shape (..., V).
        teacher_probs: Probabilities of all classes instead of the teacher's head, shape (..., V).
        teacher_top_k: Indices and log-probabilities of some classes, shape (..., k); the others are merged into
            one.
        divergence: ``"forward_kl"``, KL(teacher || student); ``"reverse_kl"``, KL(student || teacher); or
            ``"jensen_shannon"``, with m = beta teacher + (1 - beta) student the sum of beta KL(teacher || m) and
            (1 - beta) KL(student || m).
        beta: Weight of the teacher in the Jensen-Shannon divergence, above 0 and below 1. As in TRL, 0 stands for the
            forward KL and 1 for the reverse KL, which are not the limits.
        temperature: Divisor of the logits. The loss is not multiplied by its square.
        vocab_size: Number of classes to use: the first ones of both heads, which may be padded to different sizes. The
            others have a probability and a gradient of 0. Not with ``process_group``.
        target: Labels, int64 or uint8, shape of the rows; rows whose label is ``ignore_index`` are ignored.
        hard_weight: Factor of the cross entropy of ``target``, at a temperature of 1, which is added to each row's
            divergence. Its gradient is computed from the same logits.
        ignore_index: The label of ignored rows; only with ``target``.
        shift: Number of positions by which labels are shifted, ``True`` for 1; results are aligned with the labels.
        token_weight: Factor of each row's loss, shape of the rows, floating point, differentiable.
        reduction: ``"none"``, ``"mean"`` (over the rows that are not ignored, by ``token_weight``) or ``"sum"``.
        zero_if_all_ignored: Return 0 for the mean if all rows are ignored, instead of NaN. The gradients are 0 anyway.
        chunk_size: Number of rows whose logits are materialized at a time.
        max_memory: Bytes that logits and float32 accumulators may take, which determines the chunk size.
        process_group: The :class:`torch.distributed.ProcessGroup` over which the vocabulary is sharded, in rank order:
            heads, biases and probabilities have this rank's classes; ``teacher_top_k`` has indices of all classes.
        vocab_sizes: Number of ``linear_weight``'s rows on each rank, which saves a collective.
        reduce_input_grad: With ``process_group``, sum the gradient of ``input`` over the ranks.

    Returns:
        The loss: 0-dim, or with ``"none"`` of the shape of the rows; float32 for 16-bit inputs.

    Raises:
        IndexError: ``teacher_top_k``, or with ``hard_weight`` ``target``, has a class out of range (on a CPU in eager
            mode; otherwise, and for ``target`` with ``process_group``, the loss is NaN).
        RuntimeError: An argument of the teacher requires grad; a loss with ``process_group`` is differentiated twice.
        TypeError: An argument has the wrong type, or not exactly one teacher is given.
        ValueError: Shapes do not match, or an argument has an invalid value.

    Example:
        >>> import torch
        >>> student, head = torch.eye(2, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
        >>> loss = linear_kl_div(student, head, teacher_probs=torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 2))
        >>> loss.backward()
        >>> round(loss.item(), 4), head.grad[0].tolist() < [0.0, 0.0]
        (0.4458, True)

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); Gu et al., "MiniLLM" (2024); Agarwal
    et al., "On-Policy Distillation of Language Models" (2024); Hsu et al., "Liger Kernel" (2024).
    """
    check_choice(NAME, "divergence", divergence, get_args(Divergence))
    check_choice(NAME, "reduction", reduction, get_args(Reduction))
    check_bool(NAME, "zero_if_all_ignored", zero_if_all_ignored)
    check_bool(NAME, "reduce_input_grad", reduce_input_grad)
    hard = check_number(NAME, "hard_weight", hard_weight, NON_NEGATIVE)
    beta = check_beta(NAME, divergence, beta)
    if divergence == "jensen_shannon" and beta in (0, 1):  # as in TRL
        divergence, beta = "forward_kl" if beta == 0 else "reverse_kl", 0.5
    rows, bytes_held = check_memory(NAME, chunk_size, max_memory)
    temperature = check_number(NAME, "temperature", temperature)
    of_student = ("input", "linear_weight", "linear_bias")
    check_layer(of_student, input, linear_weight, linear_bias, input)
    if process_group is None:
        check_not_local_shard(NAME, REMEDY, linear_weight=linear_weight, teacher_weight=teacher_weight)
    if vocab_size is not None:
        check("vocab_size", process_group is None, "be None with process_group", f"is {vocab_size}")
        heads = (linear_weight, linear_bias, teacher_weight, teacher_bias)
        linear_weight, linear_bias, teacher_weight, teacher_bias = first_classes(vocab_size, 0, *heads)
        teacher_log_probs, teacher_probs = first_classes(vocab_size, -1, teacher_log_probs, teacher_probs)
    call = Call(
        input=input,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        target=target,
        teacher_input=teacher_input,
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        divergence=divergence,
        beta=beta,
        hard_weight=hard,
        temperature=temperature,
        chunk_size=rows,
        max_memory=bytes_held,
        ignore_index=ignore_index,
        token_weight=token_weight,
        reduction=reduction,
        zero_if_all_ignored=zero_if_all_ignored,
        reduce_input_grad=reduce_input_grad,
    )
    call = with_teacher(call, teacher_log_probs, teacher_probs, teacher_top_k)
    check_target(target, input, ignore_index)
    if hard and target is None:  # Dynamo cannot format a dynamic number
        check("hard_weight", False, "be 0 without target", f"is {hard_weight}")
    places = check_shift(NAME, shift, target)
    check("shift", not places or target is not None, "be 0 without target", f"is {shift}")
    if token_weight is not None:
        check_token_weight(NAME, token_weight, tuple(input.shape[:-1]), input)
    if places and target is not None:
        target, token_weight = labels_to_rows(target, token_weight, places, ignore_index)
        call = call._replace(target=target, token_weight=token_weight)
    if process_group is not None or vocab_sizes is not None:
        call = call._replace(shards=shards_of(NAME, process_group, vocab_sizes, linear_weight, input))
    loss = compute(prepare(call))
    loss = loss.reshape(input.shape[:-1]) if reduction == "none" else loss
    return rows_to_labels(loss, places) if places else loss
