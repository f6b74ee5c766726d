"""Whether the processes that share a vocabulary make the same call."""

from typing import NamedTuple

from torch_aclnn_ops._autograd.derivatives import any_differentiated
from torch_aclnn_ops.functional._head.agreement import REDUCTIONS, compare_summaries, hash_sizes, summarize
from torch_aclnn_ops.functional._head.collectives import gather_constant
from torch_aclnn_ops.functional._head.shards import VocabularyShards
from torch_aclnn_ops.functional.linear_kl_div.divergences import DIVERGENCES
from torch_aclnn_ops.functional.linear_kl_div.inputs import NAME, Inputs

import torch
from torch import Tensor


class _Call(NamedTuple):
    """Numbers that describe a call; all but ``excess`` must be the same on every process."""

    rows: int
    features: int
    vocab_sizes: int  # a hash
    reduction: int  # place in REDUCTIONS
    divergence: int  # place in DIVERGENCES
    beta: float
    temperature: float
    rows_per_chunk: int
    reduce_input_grad: bool
    is_differentiated: bool  # by the input, whose gradient is reduced
    zero_if_all_ignored: bool
    has_token_weight: bool
    has_gradients: bool  # by anything
    excess: int  # of this rank's rows of the head over those of vocab_sizes


def check_agreement(
    inputs: Inputs,
    shards: VocabularyShards,
    reduction: str,
    token_weight: Tensor | None,
    zero_if_all_ignored: bool,
) -> Inputs:
    """Compare the calls of all processes in a collective.

    Returns:
        The inputs, whose results are nan where the calls differ and values cannot be read.

    Raises:
        NotImplementedError: the call is compiled.
        ValueError: the calls differ.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{NAME}: process_group is not supported with torch.compile(fullgraph=True); compile with fullgraph=False,"
            " so that the graph breaks at this call"
        )
    input, measure, logits = inputs.input, inputs.options.measure, inputs.options.logits
    call = _Call(
        input.shape[0],
        input.shape[1],
        hash_sizes(shards.sizes),
        REDUCTIONS.index(reduction),
        DIVERGENCES.index(measure.divergence),
        measure.beta,
        logits.temperature,
        inputs.tile(input.shape[0]).rows_per_chunk,
        inputs.reduce_input_grad,
        inputs.reduce_input_grad and any_differentiated([input]),
        zero_if_all_ignored,
        token_weight is not None,
        any_differentiated(inputs.student),
        shards.excess,
    )
    weights = token_weight, None
    numbers = summarize(
        call, input, inputs.linear_weight, inputs.target, _of_teacher(inputs), inputs.loss_dtype(), weights
    )
    summaries = gather_constant(numbers, shards.members)
    factor = compare_summaries(NAME, call, summaries, shards.sizes, ("input", "teacher"))
    return inputs if factor is None else inputs._replace(input=input * factor.to(input.dtype))


def _of_teacher(inputs: Inputs) -> Tensor | None:
    """Return the teacher's tensor that must be the same on every process."""
    teacher = inputs.teacher
    return teacher.values if teacher.indices is not None else teacher.input
